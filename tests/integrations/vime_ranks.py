"""Two Megatron ranks that make the calls of vime's actor with the weight updater of `resharder.client.integrations.vime`.

Arguments: FOLDER URL. After each of two updates rank 0 asks the server at URL for a greedy answer.
With RESHARDER_TEST_VIME, a checkout of vime, an update is vime's own `MegatronTrainRayActor.update_weights`.
"""

import ast
import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.support.megatron_models import build_model, fill_from_hf, wrap_ddp

# isort: split
import requests
import torch
import torch.distributed as dist
from resharder.client.integrations.vime import install

from tests.support.tiny_hf import load_checkpoint
from tests.support.updating_ranks import PROMPT, TOKENS, served
from tests.support.vllm_server import VERSION_HEADER, completion

ACTOR = "vime.backends.megatron_utils.actor"


def installed(args: Any) -> ModuleType:
    """vime's module of the actor, after the hook. The module itself imports what needs CUDA."""
    module = sys.modules[ACTOR] = ModuleType(ACTOR)
    install(args)
    return module


def own_update(checkout: Path) -> Callable[[Any], None]:
    """`MegatronTrainRayActor.update_weights` of vime's source, with what it calls of Ray and of vime's utilities replaced."""
    tree = ast.parse((checkout / f"{ACTOR.replace('.', '/')}.py").read_text())
    (function,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "update_weights")
    function.decorator_list = []
    names: dict[str, Any] = {
        "ray": SimpleNamespace(get=lambda answer: answer),
        "dist": dist,
        "logger": logging.getLogger("vime"),
        "nullcontext": nullcontext,
        "get_gloo_group": lambda: None,
        "print_memory": lambda _: None,
    }
    exec(compile(ast.Module([function], []), ACTOR, "exec"), names)
    return names["update_weights"]  # type: ignore[no-any-return]


def same_update(actor: Any) -> None:
    """Call the updater as vime's `update_weights` does."""
    actor.weight_updater.connect_rollout_engines([None], None, engine_gpu_counts=[1], engine_gpu_offsets=[0])
    dist.barrier()
    actor.weight_updater.update_weights()


class Manager:
    """vime's rollout manager, as a Ray handle. The first update finds one new engine."""

    def __init__(self) -> None:
        self.new = 1
        self.get_updatable_engines_and_lock = SimpleNamespace(remote=lambda: ([None], None, self.new, [1], [0], [None]))
        self.clear_updatable_num_new_engines = SimpleNamespace(remote=lambda: setattr(self, "new", 0))


def options(folder: str) -> SimpleNamespace:
    """The options of vime that are read: trainer and servers have GPUs of their own."""
    named = ("debug_train_only", "debug_rollout_only", "use_fault_tolerance", "offload_train", "use_critic", "colocate")
    return SimpleNamespace(hf_checkpoint=folder, dspark_enabled=False, keep_old_actor=False, **dict.fromkeys(named, False))


def main(folder: str, url: str) -> None:
    dist.init_process_group("gloo")
    config = json.loads((Path(folder) / "config.json").read_text())
    chunks = build_model(config, tp=2)
    fill_from_hf(chunks, config, load_checkpoint(Path(folder)))
    args = options(folder)
    actor = SimpleNamespace(args=args, rollout_manager=Manager(), model=wrap_ddp(chunks))
    actor.weight_updater = installed(args).create_weight_updater(
        args, actor.model, weights_getter=dict, model_name="qwen3config", quantization_config=None
    )
    checkout = os.environ.get("RESHARDER_TEST_VIME")
    update = own_update(Path(checkout)) if checkout else same_update
    for _ in range(2):
        update(actor)
        if dist.get_rank() == 0:
            answer = requests.post(f"{url}/v1/completions", json=completion(PROMPT, TOKENS), timeout=300)
            served(answer.headers[VERSION_HEADER], answer.json()["choices"][0]["token_ids"])
        assert actor.weight_updater.pop_metrics() == {}
        with torch.no_grad():
            chunks[-1].get_parameter("output_layer.weight").mul_(-1)
    actor.weight_updater._publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
