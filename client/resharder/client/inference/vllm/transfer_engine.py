"""The worker's half of the backend `resharder`, which vLLM creates in each worker after the model is loaded.

It moves no weights: versions reach a worker through the daemon (`worker/agent.py`), and the control side
answers the trainer's calls (`native_updates.py`). A call that arrives here means that the engine has no
control side.
"""

from typing import Any, NoReturn

from resharder.client.errors import UsageError
from resharder.client.inference.settings import PluginSettings
from vllm.distributed.weight_transfer.base import WeightTransferEngine


class ResharderWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Implementation of vLLM's interface.

    Raises:
        UsageError: A variable is missing or invalid; the exception ends the server's start.
    """

    init_info_cls = update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        try:
            PluginSettings.from_environment()
        except UsageError as error:
            raise UsageError(f"the weight transfer backend resharder cannot start: {error}") from None

    def init_transfer_engine(self, init_info: Any) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def start_weight_update(self) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def receive_weights(self, update_info: Any) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def finish_weight_update(self) -> NoReturn:
        """Refuse the call."""
        _refuse()

    def shutdown(self) -> None:
        """Do nothing: the engine holds no connection."""


def _refuse() -> NoReturn:
    raise UsageError(
        "expected an engine that follows the daemon, got one without a control side: name resharder in VLLM_PLUGINS of the "
        "API server, or call resharder.client.attach(engine) in the program around AsyncLLM"
    )
