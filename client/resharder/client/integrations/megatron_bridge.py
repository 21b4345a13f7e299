"""Callback that publishes from Megatron-Bridge's training loop; read against 0.6.0 (`megatron/bridge/training/callbacks.py`).

    from resharder.client import PublishCallback

    pretrain(config, forward_step, callbacks=[PublishCallback("policy", hf_config, tokenizer, every=10)])

Neither this module nor the callback imports Megatron-Bridge: any loop that calls the three methods with `state.train_state.step`,
`model` and `skipped_iter` can use it.
"""

from typing import TYPE_CHECKING, Any, Protocol

from resharder.client.errors import UsageError
from resharder.client.trainer.connect import connect
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.publisher import Publisher

if TYPE_CHECKING:
    from resharder.client.trainer.model_files import Config, Tokenizer
    from resharder.converters.models.hf_names import Model

__all__ = ["PublishCallback"]


class TrainState(Protocol):
    """Progress of a training loop. `step` is the number of completed iterations, without the present one."""

    step: int


class LoopState(Protocol):
    """Megatron-Bridge's state of a training loop, as far as it is used."""

    train_state: TrainState


class CallbackContext(Protocol):
    """Argument of a callback: Megatron-Bridge's class of this name, as far as it is used."""

    state: LoopState
    model: "Model"
    skipped_iter: bool | None


class PublishCallback:
    """Publish the model when training starts, after every Nth step, and when it ends. Every rank has one.

    The version's step is the number of completed iterations. An iteration that was skipped, for example for infinite gradients,
    leaves the weights as they are, so it is not published.

    Args:
        model: Name of the model.
        hf_config: transformers config or content of config.json.
        tokenizer: Object with `save_pretrained`, or a folder.
        every: Iterations from one version to the next.
        check_replicas: As in `Publisher.attach`.
        options: Further arguments of `connect`, such as `endpoint` or `max_ahead`.

    Attributes:
        handle: The newest version; None before training starts.
    """

    def __init__(
        self,
        model: str,
        hf_config: "Config",
        tokenizer: "Tokenizer | None" = None,
        *,
        every: int = 1,
        check_replicas: bool = False,
        **options: Any,
    ) -> None:
        if every < 1:
            raise UsageError(f"expected every to be 1 or more, got {every}")
        self.handle: Handle | None = None
        self._model, self._files, self._every = model, (hf_config, tokenizer), every
        self._check_replicas, self._options = check_replicas, options
        self._publisher: Publisher | None = None
        self._changed = False

    def on_train_start(self, context: CallbackContext) -> None:
        """Connect, attach the loop's model, and publish it.

        Args:
            context: Of the loop, whose step counts completed iterations.
        """
        self._publisher = connect(model=self._model, **self._options)
        self._publisher.attach(context.model, *self._files, check_replicas=self._check_replicas)
        self._publish(context.state.train_state.step)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Publish if the step is due. The loop counts the step only after this call.

        Args:
            context: Of the loop, whose step counts completed iterations.
        """
        self._changed = self._changed or not context.skipped_iter
        step = context.state.train_state.step + 1
        if step % self._every == 0 and self._changed:
            self._publish(step)

    def on_train_end(self, context: CallbackContext) -> None:
        """Publish what is not published yet, and close the publisher.

        Args:
            context: Of the loop, whose step counts completed iterations.
        """
        if self._changed:
            self._publish(context.state.train_state.step)
        if self._publisher is not None:
            self._publisher.close()

    def _publish(self, step: int) -> None:
        if self._publisher is None:
            raise UsageError("on_train_start was not called before the first step: register the callback before training starts")
        self.handle = self._publisher.publish(step, sync=True)
        self._changed = False
