"""Client that streams one long answer after another."""

import threading
from collections.abc import Sequence
from types import TracebackType

from tests.support.vllm_server import VllmServer


class Stream(threading.Thread):
    """Stream within a `with` block. If an answer ended early, `unbroken` is False and `error` has the reason."""

    def __init__(self, server: VllmServer, prompt: Sequence[int], length: int = 300) -> None:
        super().__init__(daemon=True)
        self._server, self._prompt, self._length = server, prompt, length
        self._enough = threading.Event()
        self.tokens, self.unbroken, self.error = 0, True, ""

    def run(self) -> None:
        try:
            while not self._enough.is_set():
                got = 0
                for _ in self._server.stream(self._prompt, self._length):
                    got += 1
                    self.tokens += 1
                    if self._enough.is_set():
                        return
                if got != self._length:
                    raise RuntimeError(f"expected {self._length} tokens, the answer ended after {got}")
        except Exception as error:
            self.unbroken, self.error = False, repr(error)

    def __enter__(self) -> "Stream":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._enough.set()
        self.join(60)
