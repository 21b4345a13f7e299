"""Ids of a tokenizer in rows of the model that a version leaves out as padding.

Megatron pads the vocabulary, and a version has the rows of the config alone. Rows that the config forgets look like padding.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any

from resharder.client.trainer.model_files import Tokenizer
from resharder.converters.allowances import VARIABLE, refuse
from resharder.converters.errors import LayoutError
from resharder.v1 import resources_pb2


def refuse_ids_in_padding(
    tokenizer: Tokenizer | None, files: Iterable[resources_pb2.ModelFile], vocab_size: int, rows: int
) -> None:
    """Raise LayoutError for a tokenizer with ids of rows that are taken for padding, unless the environment allows it.

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
