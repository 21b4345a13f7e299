"""Files of a model besides its weights: config.json, and those of the tokenizer, whose ids must have rows in a version."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

from resharder.client.errors import UsageError
from resharder.converters.adapter import check_config, is_adapter_config
from resharder.converters.allowances import VARIABLE, refuse
from resharder.converters.architectures import ARCHITECTURES
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.checkpoint_files import GENERATION, code_files, folder_names, missing_files
from resharder.converters.errors import ConversionError, LayoutError
from resharder.converters.quantization.scheme import Scheme, check_family
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    from resharder.converters.models.hf_names import Model


_log = logging.getLogger(__name__)
TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*", "generation_config.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "image_processor_config.json",
)  # fmt: skip
"""Files of a tokenizer, and those of the processor of images and videos beside it."""


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
                f"the config of model_type {content.get('model_type')!r} has no `architectures`, by which servers choose the "
                f"model's class"
            )
        content["architectures"] = known[:1]
    return resources_pb2.ModelFile(path="config.json", content=json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")


def known_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the shapes of whole tensors by name; empty for a family without a table."""
    with suppress(ConversionError):
        return expected_shapes(plain_config(config))
    return {}


def plain_config(config: Config) -> dict[str, Any]:
    """Return the content of config.json as a dict. Raises UsageError for anything but a config."""
    if isinstance(config, Mapping):
        if is_adapter_config(config):
            raise UsageError("expected the config of a model, got that of an adapter: name the adapter's base, connect(base=…)")
        return dict(config)
    if not hasattr(config, "save_pretrained"):
        given = "None" if config is None else f"{type(config).__name__} {config!r}"
        raise UsageError(f"the model's config is needed: pass a transformers config or the content of config.json, got {given}")
    saved = _saved(config)
    if (name := folder_names(base="").config) not in saved:
        raise UsageError(
            f"expected the config of a model, got {type(config).__name__}: pass a transformers config; for PEFT's config name "
            "the adapter's base, connect(base=…)"
        )
    return dict(json.loads(saved[name]))


def model_files(
    config: Config, tokenizer: Tokenizer | None, scheme: Scheme | None = None, model: "Model | None" = None
) -> list[resources_pb2.ModelFile]:
    """Return config.json, the tokenizer's files, and the generation config and code files that belong to them.

    What neither gives is taken from `model` and from the local folders they were loaded from. A line in the log names what is
    missing then. Raises as `config_file` and `tokenizer_files` do.
    """
    contents = {file.path: file.content for file in (config_file(config, scheme), *tokenizer_files(tokenizer))}
    generation = getattr(_first_module(model), "generation_config", None)
    if GENERATION not in contents and generation is not None and hasattr(generation, "to_json_string"):
        contents[GENERATION] = generation.to_json_string().encode()
    is_folder = isinstance(tokenizer, str | Path)  # a checkpoint, which has a generation config or is served without one
    wanted = code_files(contents) | (set() if is_folder or tokenizer is None else {GENERATION})
    sources = [*_sources(config, tokenizer)] if wanted - contents.keys() else []
    while found := {name: source[name] for source in sources for name in wanted - contents.keys() if name in source}:
        contents |= found
        wanted |= code_files(contents)
    if wanted - contents.keys() and (missing := missing_files(contents)):
        _log.warning("%s; pass the checkpoint's folder as tokenizer", missing)
    return [resources_pb2.ModelFile(path=path, content=content) for path, content in contents.items()]


def adapter_files(config: Config, tokenizer: Tokenizer | None) -> list[resources_pb2.ModelFile]:
    """Return adapter_config.json as PEFT writes it for inference, and the tokenizer's files.

    Raises UsageError for anything but the config of an adapter, and UnsupportedModel for one that servers cannot load.
    """
    content = adapter_config(config)
    name = folder_names(base="any").config
    written = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    return [resources_pb2.ModelFile(path=name, content=written), *tokenizer_files(tokenizer)]


def adapter_config(config: Config) -> dict[str, Any]:
    """Return the content of adapter_config.json. Raises as `adapter_files` does."""
    if isinstance(config, Mapping):
        content = dict(config)
    elif hasattr(config, "save_pretrained") and (written := _saved(config).get(folder_names(base="any").config)):
        content = dict(json.loads(written))
    else:
        raise UsageError(
            f"the adapter's config is needed: pass PEFT's LoraConfig or the content of adapter_config.json, got "
            f"{type(config).__name__}"
        )
    check_config(content)
    content = {name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in content.items()}
    content.pop("runtime_config", None)  # of the trainer's process; PEFT does not write it either
    return content | {"peft_type": "LORA", "inference_mode": True}


def _first_module(model: "Model | None") -> object:
    """Return the module of a model, or the first of its parts, without wrappers that hold it as `module`."""
    if model is None:
        return None
    from resharder.converters.models.hf_names import roots_of

    found: object = next(iter(roots_of(model)), None)
    while not hasattr(found, "generation_config") and hasattr(found, "module"):
        found = found.module
    return found


def _sources(config: Config, tokenizer: Tokenizer | None) -> Iterator[dict[str, bytes]]:
    """Yield the small files that objects write, and those of local folders that they were loaded from."""
    for given in (tokenizer, config):
        if isinstance(given, str | Path):
            yield _read(Path(given))
            continue
        if given is None or isinstance(given, Mapping):
            name = given.get("_name_or_path") if given else None
        else:
            yield _saved(given)
            name = getattr(given, "name_or_path", None)
        if name and Path(str(name)).is_dir():
            yield _read(Path(str(name)))


def tokenizer_files(tokenizer: Tokenizer | None) -> list[resources_pb2.ModelFile]:
    """Return the files of a tokenizer, or of a folder that has one. Raises UsageError if there are none."""
    if tokenizer is None:
        return []
    if not isinstance(tokenizer, str | Path) and not hasattr(tokenizer, "save_pretrained"):
        raise UsageError(f"expected a tokenizer or a folder that has one, got {tokenizer!r}")
    contents = _read(Path(tokenizer)) if isinstance(tokenizer, str | Path) else _saved(tokenizer)
    files = [
        resources_pb2.ModelFile(path=path, content=content)
        for path, content in sorted(contents.items())
        if any(fnmatch(path, pattern) for pattern in TOKENIZER_FILES)
    ]
    if not files:
        raise UsageError(f"{tokenizer!r} has no tokenizer files: pass the checkpoint's folder as tokenizer")
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


def refuse_ids_in_padding(
    tokenizer: Tokenizer | None, files: Iterable[resources_pb2.ModelFile], vocab_size: int, rows: int
) -> None:
    """Raise LayoutError for a tokenizer with ids of rows that are taken for padding, unless the environment allows it.

    Megatron pads the vocabulary, and a version has the rows of the config alone. Rows that the config forgets look like padding.

    Tokenizers have fewer ids than a model has rows, or ids for which it has none at all, as Gemma 3's for images; both are taken.

    Args:
        tokenizer: The tokenizer or its folder.
        files: Its files.
        vocab_size: Rows of a version, from the config.
        rows: Rows of the trainer's model, padding included.
    """
    last = max((*_ids_in_files(files), *_ids_of(tokenizer)), default=0)
    if vocab_size <= last < rows:
        error = LayoutError(
            f"the tokenizer has ids up to {last}, the config has vocab_size={vocab_size}, the model has {rows} rows: a version "
            f"would leave out rows {vocab_size} to {last} as padding, and no server would know these tokens. Attach with "
            f"vocab_size={last + 1}, with which the model was built, or set {VARIABLE}=tokenizer-ids if they are never used"
        )
        refuse("tokenizer-ids", error)


def _ids_of(tokenizer: object) -> list[int]:
    """Return the ids of a tokenizer in memory, of which files may be in a form that is not read here (SentencePiece)."""
    vocabulary: object = getattr(tokenizer, "get_vocab", dict)()
    return [number for number in vocabulary.values() if isinstance(number, int)] if isinstance(vocabulary, Mapping) else []


def _ids_in_files(files: Iterable[resources_pb2.ModelFile]) -> list[int]:
    """Return ids in the files of a tokenizer. Files of other forms are skipped."""
    ids: list[int] = []
    for file in files:
        read = _READERS.get(file.path) or _READERS.get(f"*{PurePath(file.path).suffix}")
        if read is not None:
            with suppress(AttributeError, IndexError, KeyError, TypeError, ValueError):
                ids += read(file.content)
    return ids


def _fast(content: bytes) -> list[int]:
    whole: Any = json.loads(content)
    vocabulary = (whole.get("model") or {}).get("vocab") or {}
    known = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else [len(vocabulary) - 1]
    return [*known, *(int(token["id"]) for token in whole.get("added_tokens") or ())]


def _numbers(content: bytes) -> list[int]:
    return [int(number) for number in json.loads(content).values()]


def _settings(content: bytes) -> list[int]:
    return [int(number) for number in json.loads(content).get("added_tokens_decoder") or {}]


def _lines(content: bytes) -> list[int]:
    return [len(content.decode().splitlines()) - 1]


def _ranks(content: bytes) -> list[int]:
    return [int(line.split()[1]) for line in content.splitlines() if line.strip()]


_READERS: Mapping[str, Callable[[bytes], list[int]]] = {
    "tokenizer.json": _fast,
    "vocab.json": _numbers,
    "added_tokens.json": _numbers,
    "tokenizer_config.json": _settings,
    "vocab.txt": _lines,
    "*.tiktoken": _ranks,
}
"""Reader of the ids in each file that a tokenizer may have."""
