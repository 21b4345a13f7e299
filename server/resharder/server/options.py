"""Options of a command, from the fields of a pydantic model: its flags, their help, and the rows of the pages about them.

A field's description is one text in Markdown. Its first sentence is the help of the flag.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

OptionalPath = Annotated[Path | None, BeforeValidator(lambda given: None if given == "" else given)]
"""A path, or None: also for an empty text, as Compose and unit files give for a variable without a value."""
_FLAG_TYPES = (bool, int, float, str, Path)


@dataclass(frozen=True)
class Option:
    """An option of a model. `flag` is empty for one that only a file can hold."""

    name: str
    flag: str
    variable: str
    default: str
    meaning: str

    @property
    def help(self) -> str:
        """The first sentence, without Markdown."""
        first = re.split(r"\.\s|\.$", self.meaning, maxsplit=1)[0]
        return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", first).replace("`", "")


def options(model: type[BaseSettings]) -> Iterator[Option]:
    """Yield the options of a model in their order."""
    prefix = model.model_config.get("env_prefix", "")
    for name, field in model.model_fields.items():
        kind, dashed = _flag_type(field), name.replace("_", "-")
        flag = "" if kind is None else f"--[no-]{dashed}" if kind is bool else f"--{dashed}"
        yield Option(name, flag, f"{prefix}{name.upper()}", _default(field), field.description or "")


def _default(field: FieldInfo) -> str:
    """Return the default as a page shows it. A field whose default depends on the host says it in `json_schema_extra`."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "default" in extra:
        return str(extra["default"])
    value = field.get_default()
    if value is None or value == "" or value == {}:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.15g}" if isinstance(value, float) else f"`{value}`" if isinstance(value, str) else str(value)


def _flag_type(field: FieldInfo) -> type | None:
    """Return the type of a field's flag; None for a field that no flag can hold.

    The choices of a Literal are left to the model, whose error names the option and lists them.
    """
    kind: Any = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return str
    return kind if kind in _FLAG_TYPES else None


def version_option(text: str) -> Any:
    """Return the option `--version`, which prints `text` and ends the command."""

    def show(wanted: bool) -> None:
        if wanted:
            print(text)
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="print the release")


def flags_of(model: type[BaseSettings]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a typer command a flag for each field of `model`.

    The command's `**given` has the flags of the command line, by the names of the fields.
    """
    texts = {option.name: option.help for option in options(model)}

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        own = [each for each in inspect.signature(run).parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        flags = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind | None, typer.Option(help=texts[name])],
            )
            for name, field in model.model_fields.items()
            if (kind := _flag_type(field)) is not None
        ]
        kept = {each.name for each in own}

        @functools.wraps(run)
        def command(**values: Any) -> None:
            run(**{name: value for name, value in values.items() if name in kept or value is not None})

        shown = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        shown.sort(key=lambda each: each.name == "version")  # at the end of the help
        at = len(shown) - ("version" in kept)
        parameters = [*shown[:at], *flags, *shown[at:]]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate
