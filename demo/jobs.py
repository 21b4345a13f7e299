"""Requests to a torchrun job and its replies, as files in a folder.

The starter of the job writes requests. Rank 0 reads each one and shares it with the other ranks, all ranks execute it, and rank 0
replies.
"""

import json
import time
from pathlib import Path
from typing import Any

Request = dict[str, Any]


class JobFailed(RuntimeError):
    """Job that has ended, or that replied with an error."""


class Requests:
    """Starter's side of a job. `alive` returns whether the job is running."""

    def __init__(self, folder: Path, alive: Any) -> None:
        self._folder, self._alive, self._count = folder, alive, 0

    def send(self, **request: Any) -> int:
        self._count += 1
        _write(self._folder / f"{self._count:04}.request.json", request)
        return self._count

    def reply(self, number: int, timeout: float = 180.0) -> Request:
        path, end = self._folder / f"{number:04}.reply.json", time.monotonic() + timeout
        while not path.exists():
            if not self._alive():
                raise JobFailed("the trainer ended before it answered; its output says why")
            if time.monotonic() > end:
                raise JobFailed(f"expected an answer of the trainer within {timeout} s")
            time.sleep(0.01)
        reply: Request = json.loads(path.read_text())
        if "error" in reply:
            raise JobFailed(reply["error"])
        return reply

    def ask(self, timeout: float = 180.0, **request: Any) -> Request:
        return self.reply(self.send(**request), timeout)


def next_request(folder: Path, number: int) -> Request:
    """Return the request with this number, after waiting for it; rank 0's side."""
    path = folder / f"{number:04}.request.json"
    while not path.exists():
        time.sleep(0.005)
    request: Request = json.loads(path.read_text())
    return request


def answer(folder: Path, number: int, reply: Request) -> None:
    _write(folder / f"{number:04}.reply.json", reply)


def _write(path: Path, content: Request) -> None:
    """Write a file atomically, so that a reader never reads a part of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.rename(path)
