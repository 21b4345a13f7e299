"""The gate in front of SGLang's HTTP server, and the control side behind it; read against 0.5.17 and 0.5.23.

SGLang has one API process with a tokenizer manager. The plugin adds two middlewares to its application and attaches the engine
when the application starts, also where a program starts it, as verl's server does (`async_sglang_server.py`, read at 0.9.1).
SGLang's warm-up is a request to the server itself, so it waits until the gate is open.
"""

import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from resharder.client.errors import UsageError
from resharder.client.inference.settings import PluginSettings, server_address

if TYPE_CHECKING:  # SGLang says where metrics go before prometheus_client may be imported
    from resharder.client.inference.control.attach import AttachedEngine
    from resharder.client.inference.control.gate import Gate

_ATTRIBUTE = "resharder"  # of a tokenizer manager: its `Attached`
_GATE, _ADDRESS = "resharder_gate", "resharder_address"  # of an application's state; no address where a program starts it
_LOOK_SECONDS = 0.05  # between looks whether the gate is open


class Attached:
    """The end of an attached engine. Use it on the engine's event loop."""

    def __init__(self) -> None:
        self.failure = ""
        """Why the engine has ended without an order; empty while it has not."""
        self.gate: Gate | None = None
        """The engine's gate; None before the engine is attached."""
        self.handle: AttachedEngine | None = None
        """Its handle, likewise."""

    def end(self, failure: str) -> None:
        """Announce the end of the engine to the daemon, at once.

        Args:
            failure: Why it ends without an order; empty if it does not.
        """
        self.failure = failure
        if self.handle is not None and self.gate is not None:
            self.gate.shut(failure or "the server ends")
            self.handle.leave()


def watch_server() -> None:
    """Gate all HTTP servers that are started from now on, and attach their engines. Unsupported ones start no process."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers import tokenizer_manager
    from sglang.srt.runtime_context import get_server_args
    from sglang.srt.server_args import ServerArgs

    plain_run, plain_warm_up = http_server._setup_and_run_http_server, http_server._wait_and_warmup
    handler = tokenizer_manager.SignalHandler
    plain_term, plain_quit = handler.sigterm_handler, handler.running_phase_sigquit_handler
    plain_launch = Engine._launch_scheduler_processes.__func__
    if hasattr(plain_run, "resharder"):
        return

    @functools.wraps(plain_launch)
    def launch(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, ServerArgs)), None)  # 0.5.17
        check(ModelConfig.from_server_args(given or get_server_args()), PluginSettings.from_environment(), given)
        if not hasattr(http_server.app.state, _GATE):
            gate(http_server.app, lambda: http_server.get_global_state().tokenizer_manager)
        return plain_launch(cls, *args, **kwargs)

    @functools.wraps(plain_run)
    def run(*args: Any, **kwargs: Any) -> Any:
        setattr(http_server.app.state, _ADDRESS, _address(PluginSettings.from_environment()))
        return plain_run(*args, **kwargs)

    @functools.wraps(plain_warm_up)
    def warm_up(*args: Any, **kwargs: Any) -> Any:
        if _opened(http_server.app, http_server.get_global_state().tokenizer_manager):
            return plain_warm_up(*args, **kwargs)
        return None

    @functools.wraps(plain_term)
    def term_handler(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached = getattr(self.tokenizer_manager, _ATTRIBUTE, None)
        if attached is not None:  # before its requests are drained: 0.5.17 ends by SIGKILL afterwards
            attached.end("")
        return plain_term(self, *args, **kwargs)

    @functools.wraps(plain_quit)
    def quit_handler(self: Any, *args: Any, **kwargs: Any) -> Any:
        attached, ordered = getattr(self.tokenizer_manager, _ATTRIBUTE, None), self.tokenizer_manager.gracefully_exit
        if attached is not None:  # a SIGTERM to all processes of a server is an order too
            attached.end("" if ordered else "one of its processes ended")
        return plain_quit(self, *args, **kwargs)

    run.resharder = True  # type: ignore[attr-defined]
    http_server._setup_and_run_http_server, http_server._wait_and_warmup = run, warm_up
    handler.sigterm_handler, handler.running_phase_sigquit_handler = term_handler, quit_handler
    Engine._launch_scheduler_processes = classmethod(launch)


def gate(app: Any, manager: Callable[[], Any]) -> None:
    """Put gate and rules in front of an application's routes, behind its authentication, and attach its engine when it starts.

    Args:
        app: SGLang's FastAPI application.
        manager: Returns its tokenizer manager when it starts.

    Raises:
        UsageError: A variable is invalid.
    """
    from resharder.client.inference.control.gate import Gate, GateMiddleware
    from resharder.client.inference.control.route_rules import RouteRulesMiddleware
    from resharder.client.inference.sglang.routes import ROUTES, RULES
    from resharder.client.inference.version_page import page
    from starlette.middleware import Middleware

    settings = PluginSettings.from_environment()
    made = Gate(prefer=settings.prefer, hold_seconds=settings.hold_seconds)
    setattr(app.state, _GATE, made)
    app.user_middleware += [  # the last one is the innermost
        Middleware(RouteRulesMiddleware, rules=RULES),
        Middleware(GateMiddleware, gate=made, routes=ROUTES, installed=lambda: page().version),
    ]
    plain = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with plain(app) as state:
            handle = await attach_sglang(manager(), settings, gate=made, address=getattr(app.state, _ADDRESS, ""))
            try:
                yield state
            finally:
                handle.leave()

    app.router.lifespan_context = lifespan


def check(model_config: Any, settings: PluginSettings, server_args: Any = None) -> None:
    """Raise `UsageError` if a server is not supported.

    Args:
        model_config: SGLang's `ModelConfig`.
        settings: The plugin's settings.
        server_args: SGLang's `ServerArgs`, by default this process's.
    """
    from resharder.client.inference.sglang.host import REPLICAS, server_config
    from resharder.client.inference.sglang.refusals import refuse_settings, refuse_unsupported

    refuse_settings(settings)
    if problem := refuse_unsupported(server_config(server_args), model_config, replicas=REPLICAS):
        raise UsageError(f"{problem}: start SGLang without it, or leave resharder out of SGLANG_PLUGINS")


async def attach_sglang(
    engine: Any, settings: PluginSettings | None = None, *, gate: "Gate | None" = None, address: str = ""
) -> "AttachedEngine":
    """Attach an engine to the daemon. Returns at once, even if the daemon is away.

    Args:
        engine: SGLang's `Engine`, or its tokenizer manager, on whose event loop this is called.
        settings: The plugin's settings, by default from the environment.
        gate: The gate in front of the engine, by default a new one.
        address: Address of the server, as the daemon's operators see it.

    Returns:
        The handle of the attached engine.

    Raises:
        UsageError: The engine or its configuration is not supported.
    """
    from resharder.client.inference.control.attach import ControlSide
    from resharder.client.inference.engine import EngineTraits
    from resharder.client.inference.sglang.engine import SGLangEngine
    from resharder.client.inference.sglang.host import server_config
    from resharder.client.inference.sglang.refusals import cannot_sleep
    from resharder.client.inference.version_page import page

    manager = getattr(engine, "tokenizer_manager", engine)
    settings = settings or PluginSettings.from_environment()
    check(manager.model_config, settings)
    config, attached = server_config(), Attached()
    side = ControlSide(
        SGLangEngine(manager, int(config.dp_size), ended=lambda: attached.handle is not None and attached.handle.closed),
        settings,
        EngineTraits("sglang", "SGLang", int(config.tp_size) * int(config.dp_size), cannot_sleep(config)),
        gate=gate,
        address=address,
        failure=lambda: attached.failure,
        journal=page().read,
    )
    setattr(manager, _ATTRIBUTE, attached)
    attached.gate, attached.handle = side.gate, await side.start()
    return attached.handle


def _opened(app: Any, manager: Any, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Wait until the gate is open, and return True; False if the server ends before."""
    while getattr(app.state, _GATE).open_on is None:
        if manager.gracefully_exit:
            return False
        sleep(_LOOK_SECONDS)
    return True


def _address(settings: PluginSettings) -> str:
    from sglang.srt.runtime_context import get_serving

    serving = get_serving()
    return server_address(settings.address, serving.host, int(serving.port), settings.endpoint)
