"""Registration of the backend `resharder` with vLLM's factories for weight transfer; read against 0.32."""

from importlib import import_module
from typing import Any

BACKEND = "resharder"
_ENGINE = ("resharder.client.inference.vllm.transfer_engine", "ResharderWeightTransferEngine")
_TRAINER = ("resharder.client.integrations.vllm", "ResharderTrainerEngine")


def register_backend() -> bool:
    """Register both halves of the backend, by the names of their classes.

    Returns:
        Whether this vLLM has the factories, as 0.28 and 0.32 do.
    """
    try:
        factory: Any = import_module("vllm.distributed.weight_transfer.factory")
    except ModuleNotFoundError:
        return False
    if not hasattr(factory, "WeightTransferTrainerFactory"):
        return False
    for registry, place in ((factory.WeightTransferEngineFactory, _ENGINE), (factory.WeightTransferTrainerFactory, _TRAINER)):
        if BACKEND not in registry._registry:
            registry.register_engine(BACKEND, *place)
    return True
