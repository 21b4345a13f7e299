"""A vLLM plugin for tests: while the file named by DEAF_SIDE exists, the second API server does not attend the daemon.

`NamesItsSide`, for vLLM's --middleware, adds the header X-Side to every answer: the name of the API server's process.
"""

import multiprocessing
import os


def register() -> None:
    from resharder.client.inference.control.lease import LeaseThread

    plain = LeaseThread._attend

    def attend(self):  # type: ignore[no-untyped-def]
        deaf = multiprocessing.current_process().name.endswith("_1") and os.path.exists(os.environ["DEAF_SIDE"])
        return "deaf" if deaf else plain(self)

    if "DEAF_SIDE" in os.environ and plain.__name__ == "_attend":
        LeaseThread._attend = attend


class NamesItsSide:
    def __init__(self, app):  # type: ignore[no-untyped-def]
        self.app = app

    async def __call__(self, scope, receive, send):  # type: ignore[no-untyped-def]
        async def named(message):  # type: ignore[no-untyped-def]
            if message["type"] == "http.response.start":
                side = (b"x-side", multiprocessing.current_process().name.encode())
                message = {**message, "headers": [*message["headers"], side]}
            await send(message)

        await self.app(scope, receive, named)
