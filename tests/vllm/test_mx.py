"""Versions in MXFP8 and MXFP4, published as they are, in real vLLM engines: every tensor and answer is that of a fresh engine.

Kernels are vLLM's emulation of MXFP8 and those of `raw_mode/resharder_reference_mx.py`, so that the engines run on any CPU. At
TP 2, MXFP8 goes by boxes and the experts of MXFP4 through `load_weights`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vllm
from packaging.version import Version

from tests.support.daemon import Daemon
from tests.support.mx_checkpoint import save_mxfp4, save_mxfp8
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import publish

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(Version(vllm.__version__) < Version("0.32"), reason="older CPU builds have neither format"),
]

PROMPT = [5, 6, 7, 8, 9, 10]


class Case(NamedTuple):
    save: Callable[[Path, int], Path]
    environment: dict[str, str]
    loaded: tuple[str, ...]
    """Ends of the names of tensors that go through `load_weights`."""


CASES = {
    "mxfp8": Case(save_mxfp8, {"VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD": "0"}, ()),
    "mxfp8-dequantised": Case(save_mxfp8, {}, ("_proj.weight", "_proj.weight_scale")),
    "mxfp4": Case(save_mxfp4, {}, ("_blocks", "_scales", "_proj_bias")),  # biases become float32
}


def state(engine: Engine) -> tuple[list[dict[str, int]], list[tuple[int, float]]]:
    """Fingerprints of every tensor of each worker, and an answer."""
    answer = engine.logprobs(PROMPT)  # the first one casts vLLM's table of rotations
    return [worker["tensors"] for worker in engine.rpc("resharder_fingerprint")], answer


@pytest.mark.parametrize(("case", "tp"), [("mxfp8", 2), ("mxfp8-dequantised", 1), ("mxfp4", 2)])
def test_versions_over_one_another_leave_what_a_fresh_engine_has(daemon: Daemon, case: str, tp: int, tmp_path: Path) -> None:
    save, environment, loaded = CASES[case]
    a, b = save(tmp_path / "a", 1), save(tmp_path / "b", 2)
    versions = publish(daemon, case, a, b)
    environment = environment | {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "RESHARDER_MODEL": case,
        "VLLM_PLUGINS": "resharder,dropping_sleep,raw_mode,reference_mx",
    }
    options: dict[str, Any] = {"environment": environment, "dtype": "bfloat16", "tensor_parallel_size": tp}
    with Engine(b, **options) as fresh:
        state_b = state(fresh)
    with Engine(a, **options) as engine:
        state_a = state(engine)
        assert state_a[1] != state_b[1]
        for turn, (version, expected) in enumerate([(versions[0], state_a), (versions[1], state_b)] * 2):
            answer = engine.install(version, f"turn-{turn}")
            assert answer["ok"], answer["error"]
            assert state(engine) == expected, turn
        workers = engine.rpc("resharder_describe")
    assert len(workers) == tp
    for about in workers:
        assert bool(about["loaded"]) == bool(loaded)
        assert all(name.endswith(loaded) for name in about["loaded"]), about["loaded"]
