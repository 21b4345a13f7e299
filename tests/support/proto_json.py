"""Messages with a value in every field, and the JSON that `--json` should print of them."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

MOMENTS = (1_700_000_000_000_000_000, 1_700_000_000_120_000_000, 1_700_000_000_123_456_000)


def expected(message: Message) -> dict[str, Any]:
    """Protobuf's JSON, with numbers for its 64-bit integers: `--json` before there were dataclasses."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _numbers(message, found)


def _numbers(message: Any, found: dict[str, Any]) -> dict[str, Any]:
    for field in message.DESCRIPTOR.fields:
        value = found.get(field.name)
        if field.message_type is not None:
            if field.message_type.full_name.startswith("resharder.") and not field.message_type.GetOptions().map_entry:
                inner = getattr(message, field.name)
                if isinstance(value, list):
                    for one, dictionary in zip(inner, value, strict=True):
                        _numbers(one, dictionary)
                elif isinstance(value, dict):
                    _numbers(inner, value)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) and value is not None:
            found[field.name] = [int(v) for v in value] if isinstance(value, list) else int(value)
    return found


def filled(message: Any, seeds: Iterator[int]) -> Any:
    """Another value in every field, two in every list."""
    for field in message.DESCRIPTOR.fields:
        many, value = field.is_repeated, getattr(message, field.name)
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                value[f"key {next(seeds)}"] = f"value {next(seeds)}"
            elif field.message_type.full_name == "google.protobuf.Timestamp":
                value.FromNanoseconds(MOMENTS[next(seeds) % len(MOMENTS)])
            elif many:
                filled(value.add(), seeds)
                filled(value.add(), seeds)
            else:
                value.SetInParent()
                filled(value, seeds)
        elif many:
            value.extend([_scalar(field, seeds), _scalar(field, seeds)])
        else:
            setattr(message, field.name, _scalar(field, seeds))
    return message


def _scalar(field: Any, seeds: Iterator[int]) -> Any:
    seed = next(seeds)
    if field.enum_type is not None:
        numbers = sorted(field.enum_type.values_by_number)
        return numbers[1 + seed % (len(numbers) - 1)]
    if field.cpp_type == field.CPPTYPE_STRING:
        return f"text {seed}" if field.type == field.TYPE_STRING else bytes([seed % 256, 255])
    if field.cpp_type == field.CPPTYPE_BOOL:
        return True
    return seed + 0.25 if field.cpp_type == field.CPPTYPE_DOUBLE else seed
