"""vime's weight updater `resharder`; read against vime 0.2.4 (`vime/backends/megatron_utils/actor.py`). slime's is the same.

    export RESHARDER_ENDPOINT=daemon:7677 RESHARDER_MODEL=policy VLLM_PLUGINS=resharder RESHARDER_UNREACHABLE=prefer
    python train.py … --custom-megatron-init-path resharder.client.integrations.vime.install \\
        --vllm-weight-transfer-config '{"backend": "resharder"}'

Every Megatron rank publishes its shards, and vime's own `vllm serve` processes, which inherit the variables, install the version.
Importing this module imports nothing of vime.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from resharder.client.errors import UsageError
from resharder.client.settings import MODEL
from resharder.client.trainer.connect import connect

if TYPE_CHECKING:
    import torch

__all__ = ["ResharderWeightUpdater", "install"]


def install(args: Any) -> None:
    """Have vime's actor of this process publish. vime calls this on every rank before it builds the model."""
    actor: Any = import_module("vime.backends.megatron_utils.actor")
    actor.create_weight_updater = ResharderWeightUpdater


class ResharderWeightUpdater:
    """Implementation of vime's interface, with the arguments of its `create_weight_updater`. Every rank must make each call.

    Args:
        args: vime's or slime's options.
        model: This rank's Megatron chunks.
        weights_getter: The framework's copy of the weights in host memory, not used.
        model_name: The framework's name of the architecture, not used: the config has it.
        quantization_config: That of the checkpoint of `--hf-checkpoint`, to which ranks cast the weights; None casts nothing.

    Attributes:
        weight_version: The framework's count of updates, the step of the version.

    Raises:
        UsageError: RESHARDER_MODEL is missing, the job offloads the weights that are to be published, or an argument is wrong.
        ResharderError: As in `Publisher.attach`.
    """

    def __init__(
        self,
        args: Any,
        model: "Sequence[torch.nn.Module]",
        weights_getter: "Callable[[], Mapping[str, torch.Tensor]] | None" = None,
        *,
        model_name: str = "",
        quantization_config: Mapping[str, Any] | None = None,
    ) -> None:
        from transformers import AutoConfig, AutoTokenizer

        if args.offload_train:
            raise UsageError(
                "the job was started with --colocate or --offload-train, and updates the servers while the model's memory is "
                "released: give trainer and servers GPUs of their own"
            )
        if not (name := MODEL.text()):
            raise UsageError("the model has no name: set RESHARDER_MODEL")
        config = AutoConfig.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the version's config gets it from the cast
        tokenizer = AutoTokenizer.from_pretrained(args.hf_checkpoint, trust_remote_code=True)
        self.weight_version: int = getattr(args, "update_weight_start_version", 0)
        self._publisher = connect(model=name, quantization_config=quantization_config)
        self._publisher.attach(model, config, tokenizer)

    def connect_rollout_engines(self, *engines: Any, **layout: Any) -> None:
        """Do nothing: the daemon knows its servers."""

    def disconnect_rollout_engines(self) -> None:
        """Do nothing: there is no group of processes."""

    def update_weights(self) -> None:
        """Publish a version and return when every server of the model serves it.

        Raises:
            ResharderError: As in `Publisher.publish` and `Handle.wait_serving`.
        """
        self.weight_version += 1
        self._publisher.publish(self.weight_version).wait_serving()

    def pop_metrics(self) -> dict[str, float]:
        """Return no metrics: the daemon has them."""
        return {}
