"""The gRPC server's event loop."""

import asyncio
from typing import Any

from resharder.server.rpc.dispatch import Dispatcher
from resharder.server.rpc.server import RpcServer


def test_a_server_that_stops_ends_what_still_runs_on_its_loop() -> None:
    """Else asyncio logs an error for a call that ends with the server."""
    access: Any = object()
    dispatcher = Dispatcher(access, lambda name: "", lambda reason: None, waits=1, transfers=1)
    server = RpcServer(dispatcher, {}, lambda made: made.add_insecure_port("127.0.0.1:0"), [])
    server.start()

    async def begin() -> "asyncio.Task[None]":
        return asyncio.create_task(asyncio.sleep(60))

    task = server.run(begin())
    server.stop(1)
    assert task.cancelled()
