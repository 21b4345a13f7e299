"""Answers of each API server of a server with two."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from tests.support.vllm_server import Response

SIDES = {"ApiServer_0", "ApiServer_1"}
SECONDS = 60
"""Bound on the questions until each API server has answered."""
SHOW_SIDES = ["--middleware", "resharder_deaf_side.NamesItsSide"]
"""Options of a server whose answers name their API server. `tests/support/raw_mode` has to be in its PYTHONPATH."""


def at_each_side(ask: Callable[[], Response]) -> list[Response]:
    """Asks, several at a time, until each API server has answered twice: one that is idle takes every connection."""
    answers: list[Response] = []
    with ThreadPoolExecutor(8) as pool:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            answers += pool.map(lambda _: ask(), range(8))
            if all([answer.headers.get("x-side") for answer in answers].count(side) >= 2 for side in SIDES):
                return answers
    raise AssertionError(f"expected answers of {SIDES}, got {[answer.headers.get('x-side') for answer in answers]}")
