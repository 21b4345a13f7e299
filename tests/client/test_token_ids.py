"""A tokenizer's ids in rows that a version leaves out as padding are refused; what published tokenizers have is not."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.trainer.model_files import Tokenizer, refuse_ids_in_padding, tokenizer_files
from resharder.converters.allowances import collecting
from resharder.converters.errors import LayoutError
from transformers import AutoTokenizer

from tests.support.tiny_hf import save_tokenizer

WORDS = {f"t{n}": n for n in range(1013)}


def folder(root: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (root / name.replace("__", ".")).write_text(text)
    return root


def attach(tokenizer: Tokenizer | None, vocab_size: int, rows: int) -> None:
    refuse_ids_in_padding(tokenizer, tokenizer_files(tokenizer), vocab_size, rows)


def refused(tokenizer: Tokenizer | None, vocab_size: int = 1003, rows: int = 1024) -> bool:
    try:
        attach(tokenizer, vocab_size, rows)
    except LayoutError:
        return True
    return False


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer__json": {"model": {"vocab": WORDS}}},
        {"tokenizer__json": {"model": {"vocab": [[word, 0.0] for word in WORDS]}}},
        {"tokenizer__json": {"model": {"vocab": {}}, "added_tokens": [{"id": 1012, "content": "<pad>"}]}},
        {"vocab__json": WORDS},
        {"vocab__txt": "\n".join(WORDS) + "\n"},
        {"added_tokens__json": {"<pad>": 1012}, "vocab__txt": "a\nb"},
        {"tokenizer_config__json": {"added_tokens_decoder": {"1012": {"content": "<pad>"}}}},
        {"qwen__tiktoken": "".join(f"YQ== {n}\n" for n in range(1013))},
    ],
)
def test_ids_are_found_in_each_form_of_a_folder(tmp_path: Path, files: Mapping[str, Any]) -> None:
    found = folder(tmp_path, **files)
    with pytest.raises(LayoutError, match=r"ids up to 1012.*vocab_size=1003.*1024 rows.*vocab_size=1013.*tokenizer-ids"):
        attach(found, 1003, 1024)
    assert not refused(found, 1013)


def test_ids_of_a_tokenizer_in_memory_are_found_with_tokens_that_were_added(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 1003)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert not refused(tokenizer)
    tokenizer.add_tokens(["<call>", "</call>"])
    with pytest.raises(LayoutError, match="ids up to 1004"):
        attach(tokenizer, 1003, 1024)


def test_ids_of_a_tokenizer_in_memory_are_found_without_files_that_can_be_read() -> None:
    def save(where: str) -> None:
        (Path(where) / "tokenizer.model").write_bytes(b"\x0a\x0b")

    assert refused(SimpleNamespace(save_pretrained=save, get_vocab=lambda: WORDS))
    assert not refused(SimpleNamespace(save_pretrained=save))


@pytest.mark.parametrize(
    ("ids", "vocab_size", "rows"),
    [
        (1000, 1003, 1024),  # fewer words than rows, as Qwen's
        (1003, 1003, 1024),
        (1025, 1024, 1024),  # a word for images for which the model has no row, as Gemma 3's
        (1013, 1003, 0),  # not a Megatron model, or one without embeddings
        (1013, 1013, 1024),
    ],
)
def test_healthy_tokenizers_are_taken(tmp_path: Path, ids: int, vocab_size: int, rows: int) -> None:
    save_tokenizer(tmp_path, ids)
    assert not refused(tmp_path, vocab_size, rows)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": null}', '{"model": {"vocab": null}}', '{"added_tokens": [{}]}'])
def test_files_of_an_unknown_form_are_taken(tmp_path: Path, content: str) -> None:
    assert not refused(folder(tmp_path, tokenizer__json=content, vocab__json=content, tokenizer_config__json=content))


def test_no_tokenizer_is_taken() -> None:
    assert not refused(None)


def test_the_environment_allows_ids_without_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tokenizer(tmp_path, 1013)
    monkeypatch.setenv("RESHARDER_ALLOW", "tokenizer-ids")
    with collecting() as texts:
        assert not refused(tmp_path)
    (text,) = texts
    assert "ids up to 1012" in text
