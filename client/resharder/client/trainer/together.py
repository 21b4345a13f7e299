"""A rank's publisher of several models from one attached model, such as BF16 to keep and FP8 to serve.

Each model has its own publisher, versions and servers. The daemon makes versions of one step READY together, one of each model,
or none. A rank therefore delivers all of them within the offer of the first: none is READY before the last one is delivered. In a
generation on the direct path, each rank has delivered all of them when the servers of one of them wake.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from resharder.client.errors import UsageError
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.model_files import Config, Tokenizer
from resharder.client.trainer.publisher import Publisher
from resharder.client.trainer.rank_layout import DeclaredTensor

if TYPE_CHECKING:
    from resharder.client.trainer.delivery import Read
    from resharder.client.trainer.rank_layout import TensorItem
    from resharder.converters.models.hf_names import Model

_ONE_BY_ONE = "expected attach(model, …) with also=…: tensors that are given one by one are published as one model"


class TogetherPublisher(Publisher):
    """Publisher of a model, and of others that are published by the same calls."""

    def __init__(self, *args: Any, others: Publisher, **options: Any) -> None:
        """Create the publisher of the first model. `others`: that of the next one, which may have a next one too."""
        super().__init__(*args, **options)
        self._others = others
        self._by_model |= others._by_model

    def attach(
        self, model: "Model", hf_config: Config, tokenizer: Tokenizer | None = None, *, wait: bool = True, **options: Any
    ) -> None:
        """Register this rank's layout of every model, as `Publisher.attach` does for one."""
        super().attach(model, hf_config, tokenizer, wait=False, **options)
        self._others.attach(model, hf_config, tokenizer, wait=wait, **options)
        if wait:
            self._session.assignment()

    def attach_tensors(self, declared: Iterable[DeclaredTensor], *, wait: bool = True) -> None:
        """Raise UsageError: tensors that are given one by one are published as one model."""
        raise UsageError(_ONE_BY_ONE)

    def publish_tensors(self, step: int, items: "Iterable[TensorItem] | Callable[[], Iterable[TensorItem]]") -> Handle:
        """Raise UsageError: tensors that are given one by one are published as one model."""
        raise UsageError(_ONE_BY_ONE)

    def release(self) -> None:
        """Release the memory of every model, as `Publisher.release` does for one."""
        super().release()
        self._others.release()

    def close(self) -> None:
        """Close the publishers of all models."""
        self._others.close()
        super().close()

    def _publish(self, step: int, read: "Read", **options: Any) -> Handle:
        shared = {key: options[key] for key in ("direct", "wakes") if key in options}

        def deliver_others(first: Handle) -> None:
            found = self._others._publish_attached(step, **shared)
            first.also.update({self._others.model: found, **found.also})

        return super()._publish(step, read, **options, then=deliver_others)
