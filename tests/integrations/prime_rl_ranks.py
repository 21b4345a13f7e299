"""Two ranks of FSDP2 that make the calls of prime-rl's trainer with the broadcast of examples/prime_rl.

Arguments: CHECKOUT FOLDER OUTPUT. The broadcast, its gather and its conversion are prime-rl's own, read from a checkout; what
their modules import besides is replaced.
"""

import logging
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.tiny_hf import load_model

STEPS = 2


def replace(name: str, **content: Any) -> None:
    """Put a module into the place of one that needs CUDA or is not installed."""
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(content)


def use(checkout: Path) -> None:
    """Make prime-rl's source importable, as far as the broadcast and the client of servers need it."""
    sys.path.insert(0, str(checkout / "src"))
    replace("prime_rl.utils.logger", get_logger=lambda: logging.getLogger("prime-rl"), format_time=str)
    replace("prime_rl.configs")
    replace("prime_rl.configs.trainer", FileSystemWeightBroadcastConfig=Any, LoRAConfig=Any, WeightBroadcastConfig=Any)
    replace("prime_rl.configs.shared", ClientConfig=Any)
    replace("prime_rl.trainer.parallel_dims", ParallelDims=Any)
    replace("prime_rl.trainer.lora", get_lora_state=None, save_lora_config=None)
    replace("prime_rl.trainer.utils", maybe_clean=None)
    replace("prime_rl.trainer.models")
    replace("prime_rl.trainer.models.base", PreTrainedModelPrimeRL=type("PreTrainedModelPrimeRL", (), {}))
    for transport in ("NCCL", "NIXL"):
        replace(f"prime_rl.transports.weights.{transport.lower()}", **{f"{transport}WeightBroadcast": None})
    replace("prime_rl.utils.utils", **vars(import_module("prime_rl.utils.pathing")))
    replace("verifiers")
    replace("verifiers.v1", ClientConfig=Any)
    replace("verifiers.v1.configs")
    replace("verifiers.v1.configs.client", EvalClientConfig=None, TrainClientConfig=None)
    replace("renderers", RendererConfig=Any)


def train(model: torch.nn.Module) -> None:
    """Change the weights, as an optimizer step between two versions does."""
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(-1)


def main(checkout: str, folder: str, output: str) -> None:
    use(Path(checkout))
    from examples.prime_rl.trainer import weights

    dist.init_process_group("gloo")
    model = load_model(Path(folder))
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    broadcast = weights.FileSystemWeightBroadcast(Path(output), None)
    for step in range(STEPS):
        broadcast.broadcast_weights(model, step)
        train(model)
    broadcast.publisher.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
