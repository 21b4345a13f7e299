"""vLLM's endpoint plugin: the gate in front of the API server's routes, and the control side behind it. It adds no route.

Every API server of a server runs one plugin, under the same `RESHARDER_SERVER_ID`; the daemon elects the
leader among them. Without `RESHARDER_ENDPOINT` in the environment, which `engine_args` sets for our load format, the plugin is
a no-op.
"""

import atexit
import logging
import multiprocessing.util
import os
import signal
import sys
from argparse import Namespace
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.control.attach import AttachedEngine
from resharder.client.inference.control.gate import Gate, GateMiddleware
from resharder.client.inference.control.route_rules import RouteRulesMiddleware
from resharder.client.inference.settings import PluginSettings, server_address
from resharder.client.inference.version_page import page
from resharder.client.inference.vllm import weight_transfer
from resharder.client.inference.vllm.adapter_engine import Adapter
from resharder.client.inference.vllm.adapter_routes import AdapterGateMiddleware, AdapterNames
from resharder.client.inference.vllm.attach import attach
from resharder.client.inference.vllm.route_rules import ROUTES, RULES
from resharder.client.settings import ENDPOINT

CONFIG_CHANGED = 75
"""Exit status of a server that ends to start again on another config.json: EX_TEMPFAIL of sysexits.h."""


class EndpointPlugin:
    """The plugin's two hooks, in which an exception ends the server's start.

    vLLM creates the plugin without arguments and only logs an exception from that, so `__init__` does nothing that can fail.
    """

    name = "resharder"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._settings: PluginSettings | None = None
        self._gate: Gate | None = None
        self._adapters: dict[str, Adapter] = {}
        self._passing: set[str] = set()  # routes that neither the gate nor the rules stop
        self.handle: AttachedEngine | None = None

    def attach_router(self, app: Any) -> None:
        """Add the middlewares to the API server.

        Raises:
            UsageError: A variable is invalid.
        """
        if not ENDPOINT.text():
            return
        self._settings = PluginSettings.from_environment()
        self._gate = Gate(prefer=self._settings.prefer, hold_seconds=self._settings.hold_seconds)
        if self._settings.adapters:
            app.add_middleware(AdapterGateMiddleware, adapters=self._adapters)
        app.add_middleware(
            GateMiddleware, gate=self._gate, routes=ROUTES, installed=lambda: page().version, passing=self._passing
        )
        app.add_middleware(RouteRulesMiddleware, rules=RULES, passing=self._passing)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Attach the engine to the daemon.

        Raises:
            UsageError: The server is not supported.
        """
        settings = self._settings
        if self._gate is None or settings is None:
            return
        if engine_client is None:
            raise UsageError("this API server has no engine behind it: leave the plugin out of VLLM_PLUGINS")
        if weight_transfer.is_selected(engine_client.vllm_config):
            self._passing |= weight_transfer.ROUTES
        address = _address(args, settings)
        self.handle = await attach(engine_client, settings, gate=self._gate, address=address, end=end_process)
        self._adapters |= self.handle.adapters
        if self._adapters:
            state.openai_serving_models.lora_requests = AdapterNames(self._adapters.values())
        atexit.register(self.handle.leave)


def _installed() -> int:
    return page().version


def end_process() -> None:
    """End this API server, and with it the server, as SIGTERM does, but with the exit status `CONFIG_CHANGED`.

    vLLM ends with status 0 after SIGTERM, so that a supervisor that restarts only what has failed would not start it again.
    This skips the exit functions of modules that were imported earlier; multiprocessing's is called here.
    """
    atexit.register(_exit)
    os.kill(os.getpid(), signal.SIGTERM)


def _exit() -> None:
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CONFIG_CHANGED)


def _address(args: Namespace, settings: PluginSettings) -> str:
    uds = getattr(args, "uds", None)
    if uds and not settings.address:
        return str(uds)
    return server_address(settings.address, getattr(args, "host", None), int(getattr(args, "port", 0)), settings.endpoint)
