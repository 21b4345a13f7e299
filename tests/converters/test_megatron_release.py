"""Releases and options of megatron-core that arrange tensors as no test has seen are refused by name."""

from functools import partial

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model

# isort: split
from megatron.core import package_info
from resharder.client.tools import check
from resharder.converters.allowances import collecting
from resharder.converters.errors import UnsupportedModel
from resharder.converters.models import local_layout
from resharder.converters.models.megatron import build
from resharder.converters.models.megatron.release import refuse_untested_release


@pytest.mark.parametrize("release", ["0.16.0", "0.16.1", "0.16.2rc1", "0.16.1+3f2a"])
def test_a_tested_release_is_taken(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    monkeypatch.setattr(package_info, "__version__", release)
    refuse_untested_release()


@pytest.mark.parametrize("release", ["0.15.3", "0.17.0", "0.19.2", "0.160.1", "1.0"])
def test_an_untested_release_is_refused_by_name_unless_allowed(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    config = tiny_hf.tiny_config("llama")
    fakepg.enter(0, 1)
    chunks = build_model(config, device="meta", init_model_with_meta_device=True)
    monkeypatch.setattr(package_info, "__version__", release)
    with pytest.raises(UnsupportedModel, match=rf"megatron-core {release} is not tested.*0\.16\.x, or set RESHARDER_ALLOW="):
        local_layout(chunks, config)
    with pytest.raises(UnsupportedModel, match=f"megatron-core {release} is not tested"):
        check.parallel(2, tp=2, pp=1, vpp=0, cp=1, ep=1, etp=0)
    monkeypatch.setenv("RESHARDER_ALLOW", "tokenizer-ids,megatron-release")
    with collecting() as texts:
        local_layout(chunks, config)
    assert [text for text in texts if f"megatron-core {release} is not tested" in text] == texts != []


def test_a_release_whose_modules_changed_is_no_traceback_in_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """As megatron-core 0.19, in which a spec of an MLP is a function."""

    def specs(layers: object, *given: object) -> None:
        partial(print).submodules  # type: ignore[attr-defined]  # noqa: B018

    monkeypatch.setattr(build, "change_specs", specs)
    fakepg.leave()
    with pytest.raises(UnsupportedModel, match=r"megatron-core refuses this: AttributeError: 'functools\.partial' object has no"):
        check.check(tiny_hf.tiny_config("llama"), check.parallel(2, tp=2, pp=1, vpp=0, cp=1, ep=1, etp=0))


@pytest.mark.parametrize("option", ["moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"])
def test_gate_and_up_in_blocks_are_refused_by_the_option(option: str) -> None:
    config = tiny_hf.tiny_config("qwen3_moe")
    fakepg.enter(0, 1)
    chunks = build_model(config, device="meta", init_model_with_meta_device=True)
    setattr(chunks[0].config, option, None)
    local_layout(chunks, config)
    setattr(chunks[0].config, option, 32)
    with pytest.raises(UnsupportedModel, match=f"{option}=32: rows of gate and up alternate in blocks"):
        local_layout(chunks, config)
