"""Two Megatron ranks that make the calls of slime's actor with the weight updater of `resharder.client.integrations.slime`.

Arguments: FOLDER URL. After each of two updates rank 0 asks the server at URL for a greedy answer.
With RESHARDER_TEST_SLIME, a checkout of slime, its own lines of `MegatronTrainRayActor` make the updater, and its own
`update_weights` calls it.
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
from resharder.client.integrations.slime import install

from tests.support.sglang_server import asked
from tests.support.tiny_hf import load_checkpoint
from tests.support.updating_ranks import PROMPT, TOKENS, served
from tests.support.vllm_server import VERSION_HEADER

ACTOR = "slime.backends.megatron_utils.actor"


class Options(SimpleNamespace):
    """slime's options: those that are not given here are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def options(folder: str, **given: Any) -> Options:
    named = {"update_weight_mode": "full", "update_weight_transport": "nccl", "update_weight_start_version": 0}
    return Options(hf_checkpoint=folder, colocate=False, **named, **given)


def installed(args: Any) -> ModuleType:
    """slime's module of the actor, after the hook. The module itself imports what needs CUDA."""
    for name in (ACTOR.rpartition(".")[0], ACTOR):
        sys.modules[name] = ModuleType(name)
    install(args)
    return sys.modules[ACTOR]


class Manager:
    """slime's rollout manager, as a Ray handle. Each rank's first update finds one new engine."""

    def __init__(self) -> None:
        self._new = 1
        self.get_updatable_engines_and_lock = SimpleNamespace(remote=self._engines)
        self.clear_updatable_num_new_engines = SimpleNamespace(remote=lambda: None)

    def _engines(self) -> Any:
        new, self._new = self._new, 0
        return [None], None, new, [1], [0], [None]


class Own:
    """slime's own lines of a checkout, with what they call of Ray, CUDA and slime's utilities replaced."""

    def __init__(self, checkout: Path, module: ModuleType) -> None:
        tree = ast.parse((checkout / f"{ACTOR.replace('.', '/')}.py").read_text())
        (self._class,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
        self._names: dict[str, Any] = vars(module) | {
            "ray": SimpleNamespace(get=lambda answer: answer),
            "dist": dist,
            "logger": logging.getLogger("slime"),
            "nullcontext": nullcontext,
            "get_gloo_group": lambda: None,
            "print_memory": lambda _: None,
        }

    def _method(self, name: str) -> ast.FunctionDef:
        (found,) = (node for node in self._class.body if isinstance(node, ast.FunctionDef) and node.name == name)
        return found

    def updater(self, actor: Any) -> Any:
        """Run the statements of `init` that choose and make the updater."""
        body = self._method("init").body
        (last,) = (i for i, node in enumerate(body) if ast.unparse(node).startswith("self.weight_updater = "))
        chosen = [node for node in body[:last] if "update_weight_" in ast.unparse(node)]
        exec(compile(ast.Module([*chosen, body[last]], []), ACTOR, "exec"), self._names | {"self": actor, "args": actor.args})
        return actor.weight_updater

    def update(self) -> Callable[[Any], None]:
        """Return `update_weights`."""
        function = self._method("update_weights")
        function.decorator_list = []
        exec(compile(ast.Module([function], []), ACTOR, "exec"), self._names)
        return self._names["update_weights"]  # type: ignore[no-any-return]


def same_update(actor: Any) -> None:
    """Call the updater as slime's `update_weights` does."""
    actor.weight_updater.connect_rollout_engines(
        [None], None, engine_gpu_counts=[1], engine_gpu_offsets=[0], engine_parallel_configs=[None]
    )
    dist.barrier()
    actor.weight_updater.update_weights()


def main(folder: str, url: str) -> None:
    dist.init_process_group("gloo")
    config = json.loads((Path(folder) / "config.json").read_text())
    chunks = build_model(config, tp=2)
    fill_from_hf(chunks, config, load_checkpoint(Path(folder)))
    args = options(folder, model_name="qwen3config")
    actor: Any = SimpleNamespace(args=args, rollout_manager=Manager(), model=wrap_ddp(chunks), hf_config=SimpleNamespace())
    module, checkout = installed(args), os.environ.get("RESHARDER_TEST_SLIME")
    update = same_update
    if checkout:
        own = Own(Path(checkout), module)
        own.updater(actor)
        update = own.update()
    else:
        actor.weight_updater = module.UpdateWeightFromDistributed(
            args, actor.model, weights_getter=dict, model_name="qwen3config", quantization_config=None
        )
    for _ in range(2):
        update(actor)
        if dist.get_rank() == 0:
            answer = requests.post(f"{url}/generate", json=asked(PROMPT, TOKENS), timeout=300)
            served(answer.headers[VERSION_HEADER], answer.json()["output_ids"])
        with torch.no_grad():
            chunks[-1].get_parameter("output_layer.weight").mul_(-1)
    actor.weight_updater._publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
