"""Services behind the daemon's dispatcher, on a separate port, without a daemon."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from resharder.server.rpc.dispatch import Dispatcher
from resharder.server.rpc.server import RpcServer
from resharder.server.security.access import Access
from resharder.server.security.limits import Limits


@contextmanager
def serving(services: Mapping[Any, Callable[[Any, Any], None]], world: Any) -> Iterator[str]:
    """The address of an open port. `world`: the fleets, as the access check reads them."""
    ports: list[int] = []
    dispatcher = Dispatcher(
        Access(None, Limits(0, 1024), 1 << 30, world), world.model_of, lambda reason: None, waits=64, transfers=64
    )
    server = RpcServer(dispatcher, services, lambda made: ports.append(made.add_insecure_port("127.0.0.1:0")), [])
    server.start()
    try:
        yield f"127.0.0.1:{ports[0]}"
    finally:
        server.stop(1)
