"""Versions of the base model under `--enable-lora`, held against fresh engines that serve adapters too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.places import adapter_tensors

from tests.support.adapters import RANK, save_adapter
from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import make_pair, publish, without_weights
from tests.vllm.test_install import DELTA, MLA, MTP, PROMPT, weights

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
KINDS: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "dense": ("qwen3", torch.bfloat16, {}),
    "dense raw": ("qwen3", torch.float32, {"raw": True}),
    "tied": ("qwen3_tied", torch.bfloat16, {}),
    "moe": ("qwen3_moe", torch.bfloat16, {}),
    "moe attention": ("qwen3_moe", torch.bfloat16, {"lora_target_modules": list(ATTENTION)}),
    "mtp": ("glm4_moe", torch.bfloat16, {"lora_target_modules": list(ATTENTION), **MTP}),
    "mla": ("deepseek_v2_lite", torch.bfloat16, {"changes": MLA, "raw": True}),
    "gpt_oss": ("gpt_oss", torch.bfloat16, {"lora_target_modules": list(ATTENTION)}),
    "gdn": ("qwen3_next", torch.bfloat16, {"changes": DELTA}),
    "glm4": ("glm4", torch.float32, {}),
    "gemma3": ("gemma3", torch.bfloat16, {"changes": {"layer_types": ["sliding_attention", "full_attention"]}}),
    "fp8": ("qwen3", torch.bfloat16, {"quantization": "fp8_per_channel"}),
    "compiled": ("qwen3", torch.bfloat16, {"enforce_eager": False}),
}


def of_adapters(worker: Any) -> list[int]:
    """The fingerprints of what the wrappers of adapters hold. Runs in the worker."""
    return [inventory.fingerprint(tensor) for tensor in adapter_tensors(worker.get_model())]


def wrapped(worker: Any) -> int:
    """How many modules of the model are wrapped. Runs in the worker."""
    return sum("base_layer" in module._modules for module in worker.get_model().modules())


@pytest.mark.parametrize("kind", KINDS)
def test_base(daemon: Daemon, tmp_path: Path, kind: str) -> None:
    family, dtype, options = KINDS[kind]
    options = {"dtype": str(dtype).removeprefix("torch."), **LORA, **options}
    a, b = make_pair(tmp_path, family, dtype, **options.pop("changes", {}))
    name = kind.replace(" ", "-")
    adapter = save_adapter(tmp_path / "adapter", load_checkpoint(b), 1, *(ATTENTION if "lora_target_modules" in options else ()))
    (version_a,) = publish(daemon, name, a)
    environment = {
        "RESHARDER_ENDPOINT": daemon.endpoint,
        "RESHARDER_MODEL": name,
        "VLLM_PLUGINS": "resharder,dropping_sleep,lora_experts" + (",raw_mode" if options.get("raw") else ""),
    }
    with Engine(b, environment=environment, **options) as fresh:
        tensors, base, adapted = weights(fresh), fresh.logprobs(PROMPT), fresh.logprobs(PROMPT, 8, adapter)
    assert base != adapted
    with Engine(without_weights(a, tmp_path / "bare"), load_format="resharder", environment=environment, **options) as engine:
        print(engine.rpc(wrapped), engine.one("resharder_describe"))
        assert engine.add_adapter(adapter)
        slots = engine.rpc(of_adapters)
        (version_b,) = publish(daemon, name, b)
        answer = engine.install(version_b, "b")
        assert answer["ok"], answer["error"]
        got = weights(engine)
        print([p for p in got[0]][:20], set(got[0]) ^ set(tensors[0]))
        assert got == tensors
        assert engine.rpc(of_adapters) == slots
        assert engine.logprobs(PROMPT) == base
        assert engine.logprobs(PROMPT, 8, adapter) == adapted
        print(engine.one("resharder_describe"))
