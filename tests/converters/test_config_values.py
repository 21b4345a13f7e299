"""One value of a config.json is changed: the model of the old one is refused, or the value is on the list of those that change no
log-probability, which holds for transformers' model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model

# isort: split
import torch
from huggingface_hub.errors import StrictDataclassError
from resharder.converters.architectures.computation import UNCOMPARED_FIELDS
from resharder.converters.errors import ConversionError
from resharder.converters.models.megatron.layout import local_layout

from tests.support.variants import sampled

Config = dict[str, Any]
LISTED = {name for names in UNCOMPARED_FIELDS.values() for name in names}


def fields(config: Config, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in config.items():
        if name == "vision_config" or (path == ("text_config",) and name == "tie_word_embeddings"):
            continue  # the tower's are compared below, and the wrapper decides whether embeddings are tied
        if isinstance(value, dict) and name not in LISTED:
            yield from fields(value, (*path, name))
        else:
            yield (*path, name), value


def changed(config: Config, path: tuple[str, ...], value: Any) -> Config:
    inner = config[path[0]] if len(path) > 1 else {}
    return config | {path[0]: changed(inner, path[1:], value) if len(path) > 1 else value}


UNSET: dict[str, list[Any]] = {
    "attn_logit_softcapping": [5.0],
    "clip_qkv": [8.0],
    "final_logit_softcapping": [2.0],
    "q_lora_rank": [24],
    "sliding_window": [5],
    "use_bidirectional_attention": [True],
}
"""What fields that are null could be set to."""


def others(name: str, value: Any) -> list[Any]:
    """Other values that a config could have."""
    if value is None:
        return UNSET.get(name, [])
    if name == "topk_method":
        return ["group_limited_greedy" if value == "greedy" else "greedy"]
    if name in ("hidden_act", "hidden_activation"):
        return ["relu", "silu" if name == "hidden_act" and value.startswith("gelu") else "gelu"]  # Gemma takes gelu for its own
    if name == "rope_type":
        return ["linear", "yarn", "dynamic"] if value == "default" else ["default"]
    if name == "layer_types":
        kinds = {"sliding_attention": "full_attention", "linear_attention": "full_attention", "full_attention": None}
        return [[kinds[kind] or "full_attention" for kind in value]] if {*value} - {"full_attention"} else []
    if name in ("beta_fast", "beta_slow", "original_max_position_embeddings"):
        return [type(value)(2 if name == "beta_fast" else 60)]  # small changes do not move a boundary between so few channels
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value or 3]
    if isinstance(value, float):
        return [2 * value + 0.1, value / 2]
    return [] if isinstance(value, str) else [[]]


def taken(config: Config) -> set[str]:
    """The fields of which another value is taken for a model that was built with the config."""
    fakepg.enter(0, 1)
    chunks = build_model(config, spec="te" if "linear_num_key_heads" in tiny_hf.text_of(config) else "local")
    found = set()
    for path, value in fields(config):
        for other in others(path[-1], value):
            try:
                if other != value:
                    local_layout(chunks, changed(config, path, other))
                    found.add(path[-1])
            except (ConversionError, AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
                continue
    return found


def unlisted(config: Config, names: set[str]) -> set[str]:
    return {name for name in names if name not in LISTED and f"{config['model_type']}.{name}" not in LISTED}


@pytest.mark.parametrize("family", tiny_hf.ALL)
def test_another_value_is_refused_or_on_the_list(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    assert unlisted(config, taken(config)) == set()


@pytest.mark.parametrize("family", sampled(["qwen2_moe", "deepseek_v2_lite", "gpt_oss"], []))
def test_a_value_on_the_list_changes_no_logit(family: str, tmp_path: Path) -> None:
    """By transformers, whose model is what a server computes."""
    config = tiny_hf.tiny_config(family)
    folder = tiny_hf.save_checkpoint(tmp_path, config)
    tokens = torch.arange(1, 33)[None]
    expected, compared = None, 0
    for path, value in [((), None), *fields(config)]:
        if path and (unlisted(config, {path[-1]}) or path[-1] in ("return_dict", "label2id", "id2label", "is_encoder_decoder")):
            continue  # of those four, the answer's form depends
        for other in others(path[-1], value) if path else [None]:
            (folder / "config.json").write_text(json.dumps(changed(config, path, other) if path else config))
            try:
                with torch.no_grad():
                    logits = tiny_hf.load_model(folder)(tokens).logits
            except (RuntimeError, StrictDataclassError):
                continue  # transformers refuses it, as it does a width that does not fit another
            expected = logits if expected is None else expected
            assert torch.equal(logits, expected), f"{'.'.join(path)}: {value!r} -> {other!r}"
            compared += 1
    assert compared > 15
