"""Models with a tower on a GPU: what a running engine holds and answers to an image after installs is what a fresh engine does.

A minute each: `pytest tests/gpu/test_vision.py -k qwen3_vl`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect

from tests.support.daemon import Daemon
from tests.support.observing import export, wait_serving
from tests.support.tensor_hashes import differing, hashes, new_socket
from tests.support.tiny_hf import tiny_config
from tests.support.vision_models import Said, ask, image_part, picture, save_processor, vision_server
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDE = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 40001}
LANGUAGE: dict[str, dict[str, Any]] = {
    "qwen3_vl": WIDE | {"intermediate_size": 6144, "num_hidden_layers": 6},
    "qwen3_5_moe_vl": WIDE
    | {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_conv_kernel_dim": 4},
}
SECTIONS = {"qwen3_vl": [24, 20, 20], "qwen3_5_moe_vl": [6, 5, 5]}  # of half the dimensions that turn
TOWER = {"hidden_size": 512, "num_heads": 8, "intermediate_size": 1024, "patch_size": 16, "out_hidden_size": 2048}
SMALL = ["--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", str(1 << 30), "--max-num-seqs", "4"]
SMALL += ["--mm-encoder-attn-backend", "TORCH_SDPA", "--gdn-prefill-backend", "triton"]  # without FlashInfer
PICTURES = [picture(0, 96, 128), picture(1, 64, 64)]


def config_of(family: str) -> dict[str, Any]:
    config = tiny_config(family, **LANGUAGE[family], dtype="bfloat16")
    config["text_config"]["rope_parameters"]["mrope_section"] = SECTIONS[family]
    config["vision_config"] |= TOWER | {"num_position_embeddings": 256}
    return config


def answers(server: VllmServer) -> list[Said]:
    """With one image, with two, and with none."""
    first, second = map(image_part, PICTURES)
    return [ask(server, first), ask(server, second, first), ask(server)]


@pytest.mark.parametrize("family", LANGUAGE)
def test_what_an_engine_holds_and_answers_to_images_after_installs_is_what_a_fresh_one_does(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    model = save_processor(tmp_path / "model", config)
    files: dict[str, Any] = {"config": config, "tokenizer": model}
    sockets = [new_socket() for _ in range(3)]
    options: dict[str, Any] = {"plugins": ",tensor_hashes", "dtype": "bfloat16", "timeout": 200}
    # Kernels are tuned once, and not in each process: others would round otherwise.
    environment = [
        {"TENSOR_HASHES": socket, "TRITON_CACHE_AUTOTUNING": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"} for socket in sockets
    ]
    held, said = {}, {}
    with Daemon() as daemon, connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, **files) as publisher:
        publisher.publish_tensors(1, random_weights(config, 1, torch.bfloat16).items()).wait_ready(60)
        fresh: dict[int, VllmServer] = {}
        try:
            with vision_server(model, daemon.endpoint, *SMALL, env=environment[0], **options) as followed:
                booted = answers(followed)
                for version in (2, 3):
                    publisher.publish_tensors(version, random_weights(config, version, torch.bfloat16).items()).wait_serving(120)
                    wait_serving(daemon, version)
                    held[version], said[version] = hashes(sockets[0]), answers(followed)
                    export(daemon, f"models/policy/versions/{version}", tmp_path / f"exported-{version}")
                    folder, env = tmp_path / f"exported-{version}", environment[version - 1]
                    fresh[version] = vision_server(folder, None, *SMALL, env=env, **options)
                    fresh[version].start()
                assert {each.version for each in said[3]} == {"3"}
            for version, server in fresh.items():
                server.wait_ready()
                wanted = hashes(sockets[version - 1])
                assert len(wanted[0]) > 50
                assert differing(held[version], wanted) == []
                print(f"{family}, version {version}: {len(wanted[0])} tensors are those of a fresh engine")
                assert [each.content for each in said[version]] == [each.content for each in answers(server)]
        finally:
            for server in fresh.values():
                server.stop()
    assert len({each.content for each in (*booted, *said[2], *said[3])}) == 9
