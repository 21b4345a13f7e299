"""`dataclasses.replace` without a call of `__init__`, which takes a sixth of a schedule's time."""

import dataclasses
import sys
from functools import cache
from types import ModuleType
from typing import Any


@cache
def _fields(kind: type) -> tuple[str, ...]:
    """Return the fields of a dataclass; none for one whose `__init__` does more than to set them."""
    plain = not hasattr(kind, "__post_init__") and not hasattr(kind, "__slots__")
    fields = dataclasses.fields(kind)
    return tuple(field.name for field in fields) if plain and all(field.init for field in fields) else ()


def replace(thing: Any, /, **changes: Any) -> Any:
    """Return a copy of a dataclass with other values of some fields, as `dataclasses.replace` does."""
    fields = _fields(type(thing))
    if not fields or not changes.keys() <= type(thing).__dataclass_fields__.keys():
        return dataclasses.replace(thing, **changes)
    made, before = object.__new__(type(thing)), thing.__dict__
    state = made.__dict__
    for name in fields:  # not all of `__dict__`: cached properties are there too
        state[name] = before[name]
    state.update(changes)
    return made


@cache
def users() -> tuple[ModuleType, ...]:
    """Return Resharder's modules that use `dataclasses.replace`."""
    ours = [module for name, module in sys.modules.items() if name.startswith("resharder.")]
    return tuple(module for module in ours if getattr(module, "replace", None) is dataclasses.replace)
