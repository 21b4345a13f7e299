"""Releases and options of megatron-core that arrange tensors as no test has seen are refused by name."""

import re
import sys
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import UNBUILT, build_model

# isort: split
from megatron.core import package_info
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP
from resharder.client.tools import check
from resharder.converters.allowances import collecting
from resharder.converters.architectures.computation import UNSUPPORTED
from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.models import local_layout
from resharder.converters.models.megatron import build, extras, torch_dist, worlds
from resharder.converters.models.megatron.release import refuse_untested_release

pytestmark = pytest.mark.compat("refusals")


@pytest.mark.parametrize("release", ["0.16.0", "0.16.2rc1", "0.16.1+3f2a", "0.17.1", "0.18.2", "0.19.2"])
def test_a_tested_release_is_taken(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(package_info, "__version__", release)
    refuse_untested_release()


@pytest.mark.parametrize("release", ["0.15.3", "0.20.0", "0.160.1", "1.0"])
def test_an_untested_release_is_refused_by_name_unless_allowed(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    config = tiny_hf.tiny_config("llama")
    fakepg.enter(0, 1)
    chunks = build_model(config, device="meta", init_model_with_meta_device=True)
    monkeypatch.setattr(package_info, "__version__", release)
    with pytest.raises(UnsupportedModel, match=rf"megatron-core {release} is not tested.*0\.16 to 0\.19, or set RESHARDER"):
        local_layout(chunks, config)
    with pytest.raises(UnsupportedModel, match=f"megatron-core {release} is not tested"):
        check.parallel(2, tp=2, pp=1, vpp=0, cp=1, ep=1, etp=0)
    monkeypatch.setenv("RESHARDER_ALLOW", "tokenizer-ids,megatron-release")
    with collecting() as texts:
        local_layout(chunks, config)
    assert [text for text in texts if f"megatron-core {release} is not tested" in text] == texts != []


@pytest.mark.parametrize(
    "error",
    [AttributeError("'functools.partial' object has no 'submodules'"), NameError("name 'TELinear' is not defined"), IndexError()],
    ids=lambda error: type(error).__name__,
)
def test_a_release_whose_modules_changed_is_no_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def specs(layers: object, *given: object) -> None:
        raise error

    monkeypatch.setattr(build, "change_specs", specs)
    message = f"{type(error).__name__}: {re.escape(str(error))}$"
    fakepg.leave()
    with pytest.raises(UnsupportedModel, match=f"^megatron-core refuses this: {message}"):
        check.check(tiny_hf.tiny_config("llama"), check.parallel(2, tp=2, pp=1, vpp=0, cp=1, ep=1, etp=0))
    files: Any = SimpleNamespace(stored={}, folder=Path("checkpoint"))
    fakepg.enter(0, 1)
    with pytest.raises(UnsupportedModel, match=f"^megatron-core cannot build this model here: {message}"):
        torch_dist._build(tiny_hf.tiny_config("llama"), files)


def test_a_release_without_a_module_is_no_traceback_in_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, worlds.__name__, None)
    with pytest.raises(UnsupportedModel, match=r"^megatron-core refuses this: ModuleNotFoundError: "):
        check.parallel(2, tp=2, pp=1, vpp=0, cp=1, ep=1, etp=0)


def with_option(name: str, default: Any) -> Any:
    """A model whose megatron-core has one more option, or has it with this default."""
    config = tiny_hf.tiny_config("qwen3_moe")
    fakepg.enter(0, 1)
    (chunk,) = build_model(config, device="meta", init_model_with_meta_device=True)
    kind = make_dataclass(name, [(name, Any, default)], bases=(TransformerConfig,))
    kind.__module__ = TransformerConfig.__module__
    chunk.config.__class__ = kind  # type: ignore[assignment]
    setattr(chunk.config, name, default)
    return chunk


@pytest.mark.parametrize(
    ("option", "default", "value"),
    [
        ("moe_mlp_glu_interleave_size", None, 32),
        ("moe_shared_expert_glu_interleave_size", None, 32),
        ("use_grouped_gemm_for_dense_mlp", False, True),
        ("use_grouped_gemm_for_shared_expert", False, True),
        ("mla_down_proj_fusion", False, True),
        ("moe_single_grouped_weight", False, True),
        ("moe_single_grouped_bias", False, True),
        ("gtp_weight_remat_size", 1, 2),
        ("expert_gtp_weight_remat_size", 1, 2),
    ],
)
def test_an_option_that_arranges_tensors_as_no_table_has_them_is_refused_with_both_values(
    option: str, default: Any, value: Any
) -> None:
    config, chunk = tiny_hf.tiny_config("qwen3_moe"), with_option(option, default)
    local_layout([chunk], config)
    setattr(chunk.config, option, value)
    with pytest.raises(UnsupportedModel, match=rf"^{option}={value} \(default {default}\): {UNSUPPORTED[option]}: train without"):
        local_layout([chunk], config)


def test_every_option_that_is_refused_is_tried_above() -> None:
    (mark,) = test_an_option_that_arranges_tensors_as_no_table_has_them_is_refused_with_both_values.pytestmark  # type: ignore[attr-defined]
    assert {option for option, _, _ in mark.args[1]} == set(UNSUPPORTED)


def test_an_option_that_no_list_has_is_refused_with_both_values_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    config, chunk = tiny_hf.tiny_config("qwen3_moe"), with_option("moe_rows_of_next_year", 1)
    local_layout([chunk], config)
    chunk.config.moe_rows_of_next_year = 4
    with pytest.raises(UnsupportedModel, match=r"of_next_year=4 \(default 1\): .* or set RESHARDER_ALLOW=megatron-option"):
        local_layout([chunk], config)
    monkeypatch.setenv("RESHARDER_ALLOW", "megatron-option")
    with collecting() as texts:
        local_layout([chunk], config)
    assert len(texts) == 1
    assert "moe_rows_of_next_year=4" in texts[0]


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_a_spec_whose_mlp_is_a_function_is_built_as_one_whose_mlp_is_a_spec(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """As in megatron-core 0.19."""
    config = tiny_hf.tiny_config(family)
    fakepg.enter(0, 1)
    expected, _ = local_layout(build_model(config, device="meta"), config)
    change = build.change_specs

    def of_functions(layers: Any, *given: Any) -> None:
        specs = [layer.submodules.mlp for layer in layers]
        for layer in layers:
            parts = extras._parts(layer.submodules.mlp)
            layer.submodules.mlp = partial(MLP, submodules=parts)
        change(layers, *given)
        for layer, spec in zip(layers, specs, strict=True):
            layer.submodules.mlp = spec

    monkeypatch.setattr(build, "change_specs", of_functions)
    assert local_layout(build_model(config, device="meta"), config)[0] == expected


@pytest.mark.skipif(not UNBUILT, reason="megatron-core before 0.19 builds it")
@pytest.mark.parametrize(("spec", "message"), [("local", "q_lora_rank is None"), ("te", "linear_q_proj.layer_norm_weight")])
def test_a_norm_of_queries_that_the_checkpoint_does_not_have_is_refused(spec: Any, message: str) -> None:
    config = tiny_hf.tiny_config("deepseek_v2_lite")
    fakepg.enter(0, 1)
    with pytest.raises((ValueError, UnknownTensor), match=message):
        local_layout(build.build_chunks(config, spec=spec, device="meta"), config)


def test_factors_of_the_maximal_update_parametrisation_are_compared() -> None:
    config, chunk = tiny_hf.tiny_config("qwen3_moe"), with_option("use_mup", False)
    chunk.config.mup_embedding_mult, chunk.config.mup_output_mult = 4.0, 1.0
    local_layout([chunk], config)
    chunk.config.use_mup = True
    with pytest.raises(LayoutError, match=r"factor of embeddings is 1\.0 in the config, the model has .*mup_embedding_mult=4\.0"):
        local_layout([chunk], config)
