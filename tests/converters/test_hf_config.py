"""A transformers model is compared with the config that it is attached with, in every form that a config has."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.converters.allowances import collecting
from resharder.converters.errors import LayoutError
from resharder.converters.models import local_layout
from resharder.converters.models.hf_config import COMPUTED_WITH, refuse_other_config
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.support import tiny_hf

Config = dict[str, Any]
FAMILIES = [family for family in tiny_hf.FAMILIES if family not in ("kimi_k2", "mimo")]


def model_of(config: PretrainedConfig) -> torch.nn.Module:
    """What is compared: a module around one with a config, as trainers wrap models."""
    inner = torch.nn.Linear(1, 1, device="meta")
    inner.config = config  # type: ignore[assignment]
    return torch.nn.Sequential(inner)


def other(name: str, value: Any) -> Any:
    if name == "layer_types":
        kinds = {"full_attention": "sliding_attention", "sliding_attention": "full_attention"}
        return [kinds.get(kind, "full_attention") for kind in value]
    if name in ("rope_parameters", "rope_scaling"):
        if "full_attention" in value:
            return value | {"full_attention": value["full_attention"] | {"rope_theta": 7e3}}
        return value | {"rope_theta": 7e3}
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "relu" if value != "relu" else "silu"
    return value + 1 if isinstance(value, int) else value * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_with_another_value_is_refused_by_both_values(family: str) -> None:
    config = tiny_hf.tiny_config(family)
    own = tiny_hf._transformers_config(config)
    model, theirs = model_of(own), own.to_dict()
    refuse_other_config(model, theirs)
    compared = []
    for name in sorted(COMPUTED_WITH & theirs.keys()):
        if theirs[name] in (None, []):
            continue
        changed = theirs | {name: other(name, theirs[name])}
        if name in ("sliding_window", "max_window_layers") and not theirs.get("use_sliding_window", True):
            continue
        with pytest.raises(LayoutError, match=rf"\b{name} is .* in the config, the model has .*: servers compute as the config"):
            refuse_other_config(model, changed)
        compared.append(name)
    assert {"rope_parameters", "tie_word_embeddings", "vocab_size"} <= set(compared)


@pytest.mark.parametrize("family", FAMILIES)
def test_forms_of_one_config_are_the_same(family: str, tmp_path: Path) -> None:
    """Whole, as saved with the defaults left out, with what trainers change, and with integers for floats."""
    own = tiny_hf._transformers_config(tiny_hf.tiny_config(family))
    model = model_of(own)
    own.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    refuse_other_config(model, saved)
    trained = {
        "use_cache": False,
        "pad_token_id": 7,
        "dtype": "bfloat16",
        "attention_dropout": 0.1,
        "transformers_version": "4.1",
    }
    refuse_other_config(model, saved | trained)
    refuse_other_config(model, own.to_dict() | {"architectures": ["SomethingElse"], "output_router_logits": True})


def test_rotary_parameters_before_transformers_5_are_compared() -> None:
    own = tiny_hf._transformers_config(tiny_hf.tiny_config("llama"))
    old = {key: value for key, value in own.to_dict().items() if key != "rope_parameters"}
    refuse_other_config(model_of(own), old | {"rope_theta": 10000, "rope_scaling": None})
    with pytest.raises(LayoutError, match=r"rope_parameters is .*50000.* in the config, the model has .*10000"):
        refuse_other_config(model_of(own), old | {"rope_theta": 50000.0})


def test_a_config_that_its_class_does_not_take_is_compared_as_it_is() -> None:
    own = tiny_hf._transformers_config(tiny_hf.tiny_config("llama"))
    strange = own.to_dict() | {"rms_norm_eps": 0.5, "hidden_size": "many"}
    with pytest.raises(LayoutError, match=r"rms_norm_eps is 0.5 in the config, the model has 1e-06"):
        refuse_other_config(model_of(own), strange)


def test_a_text_model_inside_of_another_is_compared() -> None:
    class Outer:
        def __init__(self, epsilon: float) -> None:
            self.content = {"model_type": "some_vl", "text_config": {"rms_norm_eps": epsilon}}

        def to_dict(self) -> Config:
            return self.content

        @classmethod
        def from_dict(cls, content: Config) -> "Outer":
            return cls(content["text_config"]["rms_norm_eps"])

    model: Any = torch.nn.Module()
    model.config = Outer(1e-6)
    refuse_other_config(model, Outer(1e-6).to_dict())
    with pytest.raises(LayoutError, match=r"rms_norm_eps is 0.1 in the config, the model has 1e-06"):
        refuse_other_config(model, Outer(0.1).to_dict())


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), {"weight": torch.zeros(1)}, [torch.nn.Linear(2, 2)]])
def test_a_model_without_a_config_is_not_compared(model: Any) -> None:
    refuse_other_config(model, tiny_hf.tiny_config("llama"))


def test_attach_refuses_unless_the_environment_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_hf.tiny_config("llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_hf._transformers_config(config))
    expected, _ = local_layout(model, config)
    with pytest.raises(LayoutError, match=r"rms_norm_eps is 0.5 in the config.*RESHARDER_ALLOW=config-mismatch"):
        local_layout(model, config | {"rms_norm_eps": 0.5})
    monkeypatch.setenv("RESHARDER_ALLOW", "config-mismatch")
    with collecting() as texts:
        assert local_layout(model, config | {"rms_norm_eps": 0.5})[0] == expected
    assert len(texts) == 1


def test_a_model_with_an_activation_that_vllm_does_not_compute_is_refused() -> None:
    config = tiny_hf.tiny_config("mixtral", hidden_act="gelu")
    model = AutoModelForCausalLM.from_config(tiny_hf._transformers_config(config))
    with pytest.raises(LayoutError, match="config: hidden_act='gelu': vLLM computes with 'silu' whatever the config says"):
        local_layout(model, config)
