"""The load format `resharder` where vLLM makes a configuration of its arguments: before it starts a process or loads anything.

Other load formats are not touched: a vLLM beside which the package is installed is as it was.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.settings import ENDPOINT, VLLM_PLUGINS
from resharder.converters.allowances import refuse
from resharder.converters.wire.endpoint import DEFAULT_ENDPOINT

LOAD_FORMAT = "resharder"
_PLUGINS = VLLM_PLUGINS.name
logger = logging.getLogger("vllm.resharder")


def watch_engine_args(register: Callable[[], None]) -> None:
    """Check arguments with the load format `resharder`, and give the endpoint its default for them.

    Args:
        register: Registers the plugin in this process, once the endpoint is known. Processes that vLLM starts inherit it.
    """
    module = sys.modules.get("vllm.engine.arg_utils")  # where nothing has imported it, as in workers, nobody reads arguments
    if module is None or hasattr(module.EngineArgs.create_engine_config, "resharder"):
        return
    create = module.EngineArgs.create_engine_config

    @functools.wraps(create)
    def checked(self: Any, usage_context: Any = None, headless: bool = False, **options: Any) -> Any:
        ours = str(self.load_format).lower() == LOAD_FORMAT
        if ours and not ENDPOINT.text():
            logger.warning("%s is not set: looking for the daemon at %s", ENDPOINT.name, DEFAULT_ENDPOINT)
            ENDPOINT.set(DEFAULT_ENDPOINT)
            register()
        if getattr(usage_context, "name", "") == "OPENAI_API_SERVER" and not headless:
            _check_gate(ours)
        return create(self, usage_context, *([headless] if headless else []), **options)

    checked.resharder = True  # type: ignore[attr-defined]
    module.EngineArgs.create_engine_config = checked


def _check_gate(ours: bool) -> None:
    """Refuse an API server without the plugin's gate and control side, which vLLM loads only if VLLM_PLUGINS names them."""
    if LOAD_FORMAT in VLLM_PLUGINS.read():
        return
    if ours:
        error = UsageError(
            f"this server would never leave the version that it boots: vLLM loads the plugin's gate and its control side only if "
            f"{_PLUGINS} names the plugin. Set {_PLUGINS}=resharder (a comma-separated list: name your other plugins too). In a "
            "program that attaches the engine itself, set RESHARDER_ALLOW=no-gate"
        )
        refuse("no-gate", error)
    elif ENDPOINT.text():
        logger.warning("this server does not follow the daemon: %s does not name resharder", _PLUGINS)
