"""Conversion of protobuf messages to answers, and of answers to messages and JSON, by the annotations of each dataclass."""

from base64 import b64encode
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

A = TypeVar("A")
Read = Callable[[Message, str], Any]


def answer(kind: type[A], message: Message) -> A:
    """Return a message as a dataclass of type `kind`."""
    return kind(**{name: read(message, name) for name, read in _plan(cast(Hashable, kind))})


def keywords(value: Any) -> dict[str, Any]:
    """Return the keyword arguments of the message for a dataclass with numbers, strings and enumerations."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def plain(value: Any) -> dict[str, Any]:
    """Convert an answer to protobuf's JSON, except for 64-bit integers, which are numbers."""
    return {name: _plain(one) for name, one in keywords(value).items() if one is not None}


@cache
def _plan(kind: Hashable) -> tuple[tuple[str, Read], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, _reader(hints[field.name])) for field in fields(kind))  # type: ignore[arg-type]


def _reader(hint: Any) -> Read:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        (inner,) = (one for one in arguments if one is not NoneType)
        return partial(_optional, _reader(inner))
    if origin is tuple:
        inner = arguments[0]
        return lambda message, name: tuple(_value(inner, one) for one in getattr(message, name))
    if origin is Mapping:
        return lambda message, name: dict(getattr(message, name))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return partial(_enumerated, hint)
    return lambda message, name: _value(hint, getattr(message, name))


def _optional(read: Read, message: Message, name: str) -> Any:
    return read(message, name) if message.HasField(name) else None


def _enumerated(kind: type[StrEnum], message: Message, name: str) -> StrEnum:
    """Return the enumeration's value; UNSPECIFIED for a value that only newer daemons have."""
    known = message.DESCRIPTOR.fields_by_name[name].enum_type.values_by_number.get(getattr(message, name))
    return kind(known.name) if known is not None else next(iter(kind))


def _value(hint: type, value: Any) -> Any:
    if hint is datetime:
        return datetime.fromtimestamp(value.seconds, UTC) + timedelta(microseconds=value.nanos // 1000)
    return answer(hint, value) if is_dataclass(hint) else value


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return plain(value)
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if isinstance(value, datetime):
        return _stamp(value)
    return b64encode(value).decode() if isinstance(value, bytes) else value


def _stamp(moment: datetime) -> str:
    """Format a time as protobuf does: no fraction, three digits or six."""
    digits = "seconds" if not moment.microsecond else "microseconds" if moment.microsecond % 1000 else "milliseconds"
    return moment.replace(tzinfo=None).isoformat(timespec=digits) + "Z"
