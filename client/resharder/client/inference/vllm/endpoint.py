"""vLLM's endpoint plugin: the gate in front of the API server's routes, and the control side behind it. It adds no route.

Every API server of a server runs one, all under the same RESHARDER_SERVER_ID; the daemon picks the one that leads. Without
RESHARDER_ENDPOINT in the environment it does nothing.
"""

import atexit
import os
from argparse import Namespace
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.inference.control.gate import Gate, GateMiddleware
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import page
from resharder.client.inference.vllm.attach import AttachedEngine, attach
from resharder.client.inference.vllm.route_rules import RouteRulesMiddleware


class EndpointPlugin:
    """Made by vLLM without arguments, and what fails then is only logged: so everything that may fail is done in the two hooks,
    where an exception ends the server's start."""

    name = "resharder"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._settings: PluginSettings | None = None
        self._gate: Gate | None = None
        self.handle: AttachedEngine | None = None

    def attach_router(self, app: Any) -> None:
        """Raises UsageError for a wrong environment."""
        if not os.environ.get("RESHARDER_ENDPOINT"):
            return
        self._settings = PluginSettings.from_environment()
        self._gate = Gate(prefer=self._settings.prefer, hold_seconds=self._settings.hold_seconds)
        app.add_middleware(GateMiddleware, gate=self._gate, installed=lambda: page().version)
        app.add_middleware(RouteRulesMiddleware)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Raises UsageError for a server that is not supported."""
        if self._gate is None:
            return
        if engine_client is None:
            raise UsageError("expected an API server with an engine behind it, got none: leave the plugin out of VLLM_PLUGINS")
        self.handle = await attach(engine_client, self._settings, gate=self._gate, address=_address(args))
        atexit.register(self.handle.close)  # vLLM has no hook for its end


def _address(args: Namespace) -> str:
    uds = getattr(args, "uds", None)
    return uds or f"{getattr(args, 'host', None) or '0.0.0.0'}:{getattr(args, 'port', 0)}"
