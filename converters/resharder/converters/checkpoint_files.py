"""Names of the files of a version's folder, and the small files that config.json and the tokenizer's files refer to."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from resharder.converters.json_input import parse_json

GENERATION = "generation_config.json"


class FolderNames(NamedTuple):
    """Names of files in the folder of a model's versions."""

    config: str
    weights: str
    """Name of the only file of tensors; empty if there may be several, named as `save_pretrained` names them."""


def folder_names(base: str) -> FolderNames:
    """Return the names for a model of its own (`base` is empty), or for an adapter of `base`, whose folder is PEFT's."""
    return FolderNames("adapter_config.json", "adapter_model.safetensors") if base else FolderNames("config.json", "")


_RELATIVE = re.compile(rb"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)
_LISTS = ("config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json")


def code_files(contents: Mapping[str, bytes]) -> set[str]:
    """Return the names of Python files under `auto_map`, and of those that the ones in `contents` import from beside them."""
    found: set[str] = set()
    open_ = {name for file in _LISTS for name in _mapped(contents.get(file, b"{}"))}
    while open_:
        name = open_.pop()
        found.add(name)
        imported = {f"{module.decode()}.py" for module in _RELATIVE.findall(contents.get(name, b""))}
        open_ |= imported - found
    return found


def missing_files(contents: Mapping[str, bytes]) -> str:
    """Return a sentence about what a folder of these files lacks for a server to be as the checkpoint's; empty if nothing."""
    lacks = []
    if code := sorted(code_files(contents) - contents.keys()):
        lacks.append(f"{', '.join(code)}, which auto_map names: servers cannot load the model's own code")
    if GENERATION not in contents and any(name.startswith("tokenizer") for name in contents):
        lacks.append(f"{GENERATION}: servers use default sampling, and stop at the tokenizer's eos token alone")
    return f"the model's files lack {'; and '.join(lacks)}" if lacks else ""


def _mapped(content: bytes) -> Iterator[str]:
    """Yield the Python files of `auto_map`; none for code of another repository, `REPOSITORY--MODULE.CLASS`."""
    try:
        listed: Any = parse_json(content)
        values = listed.get("auto_map", {}).values()
    except (ValueError, AttributeError):
        return
    for value in values:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, str) and "--" not in each and "." in each:
                yield f"{each.split('.')[0]}.py"
