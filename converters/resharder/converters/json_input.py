"""JSON that another program may have damaged or made up: invalid content of any kind is a ValueError."""

import json
from collections.abc import Callable
from dataclasses import fields
from math import isfinite
from typing import Any

_LAST_TIME = 253_402_300_799.0  # the end of the year 9999, in seconds since 1970
_WIDEST = 1 << 63
_LONGEST_NAME = 255  # bytes


def parse_json(content: bytes | str) -> Any:
    """Parse JSON. Raises ValueError, also for content that is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def is_count(value: object) -> bool:
    """Return whether a value is an integer of 0 or more, and of at most 63 bits."""
    return type(value) is int and 0 <= value < _WIDEST


def is_number(value: object) -> bool:
    """Return whether a value is a finite number that can be a time in seconds since 1970."""
    return type(value) in (int, float) and isfinite(float(value)) and abs(float(value)) <= _LAST_TIME  # type: ignore[arg-type]


def is_text(value: object) -> bool:
    """Return whether a value is a string that can be encoded: without surrogates."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def is_file_name(value: object) -> bool:
    """Return whether a value can be the name of a file in a folder, rather than a path to another one."""
    return (
        is_text(value)
        and isinstance(value, str)
        and value not in ("", ".", "..")
        and not any(mark in value for mark in "/\0")
        and len(value.encode()) <= _LONGEST_NAME
    )


_CHECKS: dict[Any, Callable[[object], bool]] = {int: is_count, float: is_number, str: is_text}


def check_fields(record: Any) -> None:
    """Check the integers, numbers and strings of a dataclass that was made from JSON. Raises ValueError."""
    for field in fields(record):
        check, value = _CHECKS.get(field.type), getattr(record, field.name)
        if check is not None and not check(value):
            raise ValueError(f"expected {field.name} as {field.type}, got {str(value)[:40]!r}")
