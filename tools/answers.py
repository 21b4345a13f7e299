"""Writes the answers of the operator SDK from `proto/resharder/v1`: `python -m tools.answers`.

A message of an operator's call becomes a frozen dataclass of its name, an enumeration a StrEnum, and a comment a docstring.
"""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from resharder.v1 import operator_pb2

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "client/resharder/client/operator/answers.py"
PROTOS = ("resources.proto", "operator.proto")
WIDTH = 130

NAMES = {"Publisher": "PublisherStatus"}  # `Publisher` is the trainer's object
ALWAYS_SENT = {"Fleet.target", "Fleet.strategy", "Move.strategy"}
LEFT_OUT = {"FilePart", "DeleteFleetResponse", "ForgetServerResponse", "VerifyServerResponse"}  # a method returns their content


def _earlier(message: str, old: str, new: str, kind: str) -> str:
    return f'''
    @property
    def {old}(self) -> {kind}:
        """Earlier name of `{new}`, for one release."""
        warn_renamed("{message}.{old}", "{message}.{new}")
        return self.{new}
'''


PROPERTIES = {
    "Version": _earlier("Version", "set_aside", "skipped", "bool"),
    "Node": _earlier("Node", "received_origin_bytes", "received_daemon_bytes", "int"),
    "ArchivedVersion": '''
    @property
    def name(self) -> str:
        """Name of the version, `models/{model}/versions/{number}`."""
        return self.version

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.version.split("/")[1]

    @property
    def number(self) -> int:
        """Number of the version."""
        return int(self.version.rpartition("/")[2])
''',
}

HEAD = '''"""Answers of the daemon to an operator: dataclasses and enumerations of plain types, named as in `resharder.v1`.

Times are datetimes in UTC, to the microsecond; durations are in seconds, sizes in bytes. A version is an int, its number within
its model; 0 is none. The values of enumerations are their names in `--json`. Written by tools/answers.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from resharder.client.deprecated import warn_renamed
'''
TAIL = '''

@dataclass(frozen=True)
class ExportedVersion:
    """Result of `Operator.export`: number of files and their bytes in `folder`."""

    version: Version
    folder: Path
    files: int
    bytes: int
'''


def comments(proto: str) -> Iterator[tuple[str, str]]:
    """Yield the comment of each message, enumeration, field and value of a .proto file, by its name within the package."""
    scope: list[str] = []
    before: list[str] = []
    name, indent = "", 0
    found: dict[str, list[str]] = {}
    for line in proto.splitlines():
        code, _, comment = (part.strip() for part in line.partition("//"))
        depth = len(line) - len(line.lstrip())
        if not code and comment and name and depth > indent:
            found[name].append(comment)
        elif not code:
            before = [*before, comment] if comment else []
        elif code == "}":
            scope.pop()
            before = []
        elif opened := re.match(r"(?:message|enum|service|oneof) (\w+) \{(\})?", code):
            found[".".join([*scope, opened[1]])] = before
            scope += [] if opened[2] else [opened[1]]
            name, before = "", []
        elif declared := re.match(r"(?:[\w.<>, ]+ )?(\w+) = \d+", code):
            name, indent = ".".join([*scope, declared[1]]), depth
            found[name] = [*before, *([comment] if comment else [])]
            before = []
    yield from ((name, " ".join(lines)) for name, lines in found.items() if lines)


def docstring(text: str, indent: str) -> str:
    """Return a comment as a docstring: a sentence, wrapped."""
    text = text[:1].upper() + text[1:] if re.match(r"[a-z]+(?:'s)?[ ,.;]|[a-z]+$", text) else text
    text = text if text.endswith((".", ")")) else f"{text}."
    if len(indent) + len(text) + 6 <= WIDTH:
        return f'{indent}"""{text}"""\n'
    first, *rest = textwrap.wrap(text, WIDTH - len(indent) - 3)
    return "\n".join([f'{indent}"""{first}', *(indent + line for line in rest), f'{indent}"""']) + "\n"


def messages() -> list[Descriptor]:
    """Return the messages that answers have, each after those of its fields."""
    found: dict[str, Descriptor] = {}

    def add(message: Descriptor) -> None:
        if message.full_name.startswith("resharder.") and not message.GetOptions().map_entry and message.name not in found:
            for field in message.fields:
                if field.message_type is not None:
                    add(field.message_type)
            if message.name not in LEFT_OUT and "next_page_token" not in message.fields_by_name and not is_list(message):
                found[message.name] = message

    for method in operator_pb2.DESCRIPTOR.services_by_name["OperatorService"].methods:
        add(method.output_type)
    return list(found.values())


def is_list(message: Descriptor) -> bool:
    """Return whether a message is the answer of a List call."""
    return message.name.startswith("List") and message.name.endswith("Response")


def kind_of(field: FieldDescriptor) -> tuple[str, str]:
    """Return the type of a field and its default."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return "Mapping[str, str]", "field(default_factory=dict)"
    if field.message_type is not None:
        name = NAMES.get(field.message_type.name, field.message_type.name)
        kind, default = ("datetime", "None") if name == "Timestamp" else (name, f"{name}()")
    elif field.enum_type is not None:
        kind = field.enum_type.name
        default = f"{kind}.UNSPECIFIED"
    else:
        kind, default = {
            field.CPPTYPE_BOOL: ("bool", "False"),
            field.CPPTYPE_DOUBLE: ("float", "0.0"),
            field.CPPTYPE_STRING: ("bytes", 'b""') if field.type == field.TYPE_BYTES else ("str", '""'),
        }.get(field.cpp_type, ("int", "0"))
    if field.is_repeated:
        return f"tuple[{kind}, ...]", "()"
    sent = f"{field.containing_type.name}.{field.name}" in ALWAYS_SENT
    return (f"{kind} | None", "None") if field.has_presence and not sent else (kind, default)


def enumeration(enum: EnumDescriptor, text: dict[str, str], within: str, indent: str) -> str:
    """Return the source of an enumeration, whose members lose its own prefix."""
    prefix = f"{re.sub(r'(?<!^)(?=[A-Z])', '_', enum.name).upper()}_"
    lines = f"{indent}class {enum.name}(StrEnum):\n" + docstring(text[f"{within}{enum.name}"], f"{indent}    ") + "\n"
    for value in enum.values:
        lines += f'{indent}    {value.name.removeprefix(prefix)} = "{value.name}"\n'
        if comment := text.get(f"{within}{enum.name}.{value.name}"):
            lines += docstring(comment, f"{indent}    ")
    return lines


def dataclass_of(message: Descriptor, text: dict[str, str]) -> str:
    """Return the source of the dataclass of a message."""
    name = NAMES.get(message.name, message.name)
    source = f"@dataclass(frozen=True)\nclass {name}:\n{docstring(text[message.name], '    ')}\n"
    for enum in message.enum_types:
        source += enumeration(enum, text, f"{message.name}.", "    ") + "\n"
    for field in message.fields:
        kind, default = kind_of(field)
        source += f"    {field.name}: {kind} = {default}\n"
        if comment := text.get(f"{message.name}.{field.name}"):
            source += docstring(comment, "    ")
    return source + PROPERTIES.get(message.name, "")


def render() -> str:
    """Return the content of the SDK's module."""
    text = {name: each for proto in PROTOS for name, each in comments((ROOT / "proto/resharder/v1" / proto).read_text())}
    chosen = messages()
    enums = {f.enum_type.name: f.enum_type for m in chosen for f in m.fields if f.enum_type and not f.enum_type.containing_type}
    parts = [enumeration(enum, text, "", "") for enum in enums.values()]
    parts = [HEAD, *parts, *(dataclass_of(each, text) for each in chosen), TAIL]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render())
