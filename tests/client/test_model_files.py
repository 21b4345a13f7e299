"""Files of a model besides its weights: what `attach` takes from objects and folders, and what it says is missing."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client.errors import UsageError
from resharder.client.trainer.model_files import model_files, plain_config, tokenizer_files
from resharder.converters.checkpoint_files import missing_files

from tests.support.tiny_hf import tiny_config

CODE = {
    "tokenization_own.py": b"from .vocab_own import VOCAB\n",
    "vocab_own.py": b"VOCAB = 3\n",
    "modeling_own.py": b"import torch\n",
    "unrelated.py": b"",
}
CONFIG = tiny_config("qwen3") | {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own", "AutoModel": "there/repo--far.Far"}}
TOKENIZER = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
GENERATION = b'{"eos_token_id": [1, 2], "temperature": 0.6}'


class Tokenizer:
    """An object that writes its own files alone, and knows the folder that it came from."""

    def __init__(self, folder: str = "") -> None:
        self.name_or_path = folder

    def save_pretrained(self, save_directory: str) -> None:
        (Path(save_directory) / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
        (Path(save_directory) / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("given", [None, "Qwen/Qwen3-8B"])
def test_what_is_no_config_or_no_tokenizer_is_refused_with_what_was_given(given: Any) -> None:
    with pytest.raises(UsageError, match=f"the model's config is needed: .* got .*{given}"):
        plain_config(given)
    with pytest.raises(UsageError, match=r"expected a tokenizer or a folder that has one, got 7"):
        tokenizer_files(7)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    Tokenizer().save_pretrained(str(tmp_path))
    for name, content in (CODE | {"generation_config.json": GENERATION}).items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def files(tokenizer: Any, model: Any = None, config: dict[str, Any] = CONFIG) -> dict[str, bytes]:
    return {file.path: file.content for file in model_files(config, tokenizer, None, model)}


@pytest.mark.parametrize("form", ["folder", "object", "config"])
def test_code_and_generation_config_of_the_checkpoint_are_taken(form: str, checkpoint: Path, caplog: Any) -> None:
    given: Any = {"folder": checkpoint, "object": Tokenizer(str(checkpoint)), "config": Tokenizer()}[form]
    found = files(given, config=CONFIG | ({"_name_or_path": str(checkpoint)} if form == "config" else {}))
    expected = CODE | {"generation_config.json": GENERATION}
    del expected["unrelated.py"]
    assert {name: found.get(name) for name in expected} == expected
    assert found.keys() == {"config.json", "tokenizer.json", "tokenizer_config.json", *expected}
    assert not caplog.records


def test_a_models_generation_config_is_taken_also_inside_of_wrappers() -> None:
    from transformers import GenerationConfig

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    model = torch.nn.Linear(2, 2)
    model.generation_config = GenerationConfig(eos_token_id=[1, 2], temperature=0.6, do_sample=True)  # type: ignore[assignment]
    for given in (model, Wrapper(model), [Wrapper(model)]):
        found = json.loads(files(None, given, tiny_config("qwen3"))["generation_config.json"])
        assert (found["eos_token_id"], found["temperature"]) == ([1, 2], 0.6)


def test_what_is_missing_is_one_line(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        found = files(Tokenizer())
    (record,) = caplog.records
    assert "modeling_own.py, tokenization_own.py, which auto_map names" in record.getMessage()
    assert "generation_config.json: servers use default sampling" in record.getMessage()
    assert record.getMessage().startswith(missing_files(found))


def test_nothing_is_missing_where_there_is_no_tokenizer_and_no_code(caplog: Any) -> None:
    assert files(None, config=tiny_config("qwen3")).keys() == {"config.json"}
    assert missing_files({"config.json": b"{}"}) == missing_files({"config.json": b"\xff["}) == ""
    assert not caplog.records
