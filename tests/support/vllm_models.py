"""Checkpoints A and B of one tiny model, published to a daemon as versions 1 and 2."""

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
import vllm
from packaging.version import Version
from resharder.client.trainer import connect
from safetensors.torch import save_file

from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint, save_tokenizer, tiny_config
from tests.support.weights import random_weights

DRAFTS = Version(vllm.__version__).release[:2] != (0, 30)
"""The CPU build of 0.30 raises "Cannot inspect kernel parameters" at its first draft, without a plugin too."""
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # vLLM's MLA takes no smaller heads
DELTA = {  # vLLM's CPU kernels take no others
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
}

LANGUAGE: dict[str, dict[str, Any]] = {
    "gemma3_vl": {"layer_types": ["sliding_attention", "full_attention"]},
    "glm4v_moe": {"use_qk_norm": False},
    "kimi_k25": MLA | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_5_vl": DELTA | {"dtype": "bfloat16"},
    "qwen3_5_moe_vl": DELTA | {"dtype": "bfloat16"},
}
"""Settings of the language model by family: those of published configs, and those that vLLM's CPU kernels require."""


def config_with_images(family: str) -> dict[str, Any]:
    """The config of a family with a tower, of two layers, as vLLM serves it on a CPU."""
    changes = LANGUAGE.get(family, {})
    config = tiny_config(family, num_hidden_layers=2, **{key: value for key, value in changes.items() if key != "dtype"})
    config["dtype"] = changes.get("dtype", "float32")
    if family == "glm4v_moe":
        config |= {"image_start_token_id": 992, "image_end_token_id": 993, "video_start_token_id": 994, "video_end_token_id": 995}
    if family == "kimi_k25":
        config["use_unified_vision_chunk"] = True
        config["text_config"]["rope_parameters"] = tiny_config("deepseek_v3")["rope_parameters"]
        # vLLM's processor merges squares, transformers' tower interpolates them.
        config["vision_config"] |= {"merge_kernel_size": [2, 2], "pos_emb_height": 6, "pos_emb_width": 6}
    return config


def make_pair(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Path, Path]:
    """Two layers, and the MTP layers of families that have them, which transformers would not save."""
    config = tiny_config(family, num_hidden_layers=2, dtype=str(dtype).removeprefix("torch."), **changes)
    return save_random(folder / f"{family}-a", config, 1, dtype), save_random(folder / f"{family}-b", config, 2, dtype)


def save_random(folder: Path, config: dict[str, Any], seed: int, dtype: torch.dtype) -> Path:
    save_tokenizer(folder, config["vocab_size"])
    # transformers reads MiMo's config with code of the checkpoint's own; it is Qwen2's.
    on_disk = config | {"model_type": "qwen2"} if config["model_type"] == "mimo" else config
    (folder / "config.json").write_text(json.dumps(on_disk))
    save_file(random_weights(config, seed, dtype), folder / "model.safetensors", {"format": "pt"})
    return folder


def publish(daemon: Daemon, model: str, *folders: Path) -> list[str]:
    """The names of the versions that these checkpoints became."""
    config = json.loads((folders[0] / "config.json").read_text())
    publisher = connect.connect(daemon.endpoint, model=model, job=uuid.uuid4().hex, rank=0, world_size=1, config=config)
    try:
        handles = [publisher.publish_tensors(step, load_checkpoint(folder).items()) for step, folder in enumerate(folders, 1)]
        for handle in handles:
            handle.wait_ready(60)
        return [handle.name for handle in handles]
    finally:
        publisher.close()


def without_weights(folder: Path, target: Path) -> Path:
    """Config and tokenizer alone."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    return target
