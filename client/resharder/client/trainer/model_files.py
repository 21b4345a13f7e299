"""Files of a model besides its weights: config.json and those of the tokenizer."""

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from resharder.client.errors import UsageError
from resharder.converters.architectures import ARCHITECTURES
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import ConversionError
from resharder.converters.quantization.scheme import Scheme, check_family
from resharder.v1 import resources_pb2

TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json",
)  # fmt: skip


class Saved(Protocol):
    """Object that transformers can write into a folder, such as a config or a tokenizer."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write the object's files into a folder."""


Config = Mapping[str, Any] | Saved
Tokenizer = Saved | str | Path


def config_file(config: Config, scheme: Scheme | None = None) -> resources_pb2.ModelFile:
    """Return config.json as `save_pretrained` writes it, with the `quantization_config` of `scheme`.

    `architectures`, by which vLLM selects the model, is filled in if the model type is known. Raises UsageError otherwise, and
    UnsupportedModel for a family that cannot be cast.
    """
    content = plain_config(config)
    if scheme is not None:
        shapes = expected_shapes(content)
        check_family(content, shapes.items())
        content["quantization_config"] = scheme.config(shapes)
    if not content.get("architectures"):
        known = [a.name for a in ARCHITECTURES if a.model_type == content.get("model_type")]
        if not known:
            raise UsageError(
                f"expected `architectures` in the model's config, got none for model_type {content.get('model_type')!r}"
            )
        content["architectures"] = known[:1]
    return resources_pb2.ModelFile(path="config.json", content=json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")


def known_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole tensors by name; empty for a family without a table."""
    with suppress(ConversionError):
        return expected_shapes(plain_config(config))
    return {}


def plain_config(config: Config) -> dict[str, Any]:
    """Return the content of config.json as a dict."""
    return dict(config) if isinstance(config, Mapping) else dict(json.loads(_saved(config)["config.json"]))


def tokenizer_files(tokenizer: Tokenizer | None) -> list[resources_pb2.ModelFile]:
    """Return the files of a tokenizer, or of a folder that has one. Raises UsageError if there are none."""
    if tokenizer is None:
        return []
    contents = _read(Path(tokenizer)) if isinstance(tokenizer, str | Path) else _saved(tokenizer)
    files = [
        resources_pb2.ModelFile(path=path, content=content)
        for path, content in sorted(contents.items())
        if any(fnmatch(path, pattern) for pattern in TOKENIZER_FILES)
    ]
    if not files:
        raise UsageError(f"expected tokenizer files, got none from {tokenizer!r}")
    return files


def _saved(object_: Saved) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        object_.save_pretrained(folder)
        return _read(Path(folder))


def _read(folder: Path) -> dict[str, bytes]:
    if not folder.is_dir():
        raise UsageError(f"expected a folder with tokenizer files, got {folder}")
    small = (path for path in folder.iterdir() if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt", ".pth"))
    return {path.name: path.read_bytes() for path in small}
