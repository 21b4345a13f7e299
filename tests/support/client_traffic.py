"""Clients that query servers continuously, and a judge of whether each answer is that of one version.

with Client({"left": server, "right": other}) as client:   # one after the other, in turn
    judge = Judge(lambda version: Reference(config, weights_of(version)))
    ...
for answer in client.answers:
    assert not wrong(answer, reference)
"""

import http.client
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Self

import torch

from tests.support.vllm_server import VllmServer
from tests.support.weights import Reference

PROMPTS = ([5, 17, 42, 7, 300, 11], [800, 2, 9], [77] * 12)
TOKENS = 8
_PAUSE = 0.2  # seconds between two requests, which leave servers time for other work
_NEAR = 1e-3
_REMEMBERED = 400  # texts


@dataclass(frozen=True)
class ClientAnswer:
    """Answer of a server. `versions`: as its header lists them, in order."""

    server: str
    prompt: tuple[int, ...]
    versions: tuple[str, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


@dataclass(frozen=True)
class FailedRequest:
    """Failed request. `status` 0: the connection broke, or was refused."""

    server: str
    status: int
    reason: str


class Client:
    def __init__(self, servers: Mapping[str, VllmServer]) -> None:
        self.answers: list[ClientAnswer] = []
        self.failed: list[FailedRequest] = []
        self._servers = servers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(120)

    def _ask(self) -> None:
        for prompt in cycle(PROMPTS):
            for name, server in self._servers.items():
                if self._ended.is_set():
                    return
                found = ask(name, server, prompt)
                if isinstance(found, ClientAnswer):
                    self.answers.append(found)
                else:
                    self.failed.append(found)
                time.sleep(_PAUSE if isinstance(found, ClientAnswer) else 2 * _PAUSE)


def ask(name: str, server: VllmServer, prompt: list[int], tokens: int = TOKENS, **options: str) -> ClientAnswer | FailedRequest:
    try:
        response = server.complete(prompt, tokens, **options)
    except (OSError, http.client.HTTPException) as error:
        return FailedRequest(name, 0, repr(error))
    if response.status != 200:
        return FailedRequest(name, response.status, response.body.decode(errors="replace"))
    answer, versions = server.read(response), tuple((response.version or "").split(","))
    return ClientAnswer(name, tuple(prompt), versions, answer.token_ids, answer.logprobs, answer.finish_reason)


def first_wrong(versions: Sequence[str], made: Mapping[str, Sequence[bool]]) -> int | None:
    """Return the first token that the named versions, one after the other and back, did not make; None if they made all."""
    left = [*versions, *versions[-2::-1]]
    for at in range(len(made[versions[0]])):
        while left and not made[left[0]][at]:
            left.pop(0)
        if not left:
            return at
    return None


class Judge:
    """`reference`: of a version. What it would have said is computed once for each text: most answers are alike."""

    def __init__(self, reference: Callable[[int], Reference]) -> None:
        self._reference = reference
        self._logprobs: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def wrong(self, answer: ClientAnswer) -> str:
        """Why its tokens are not those of the versions it names, one after the other; empty where they are. The header names each
        version once: where a fleet goes back, an answer may end with the version that it began with."""
        if not all(version.isdigit() for version in answer.versions):
            return f"it names no version: {answer}"
        made = {version: self.made(answer, version) for version in answer.versions}
        at = first_wrong(answer.versions, made)
        return "" if at is None else f"token {at} is not of the version it should be: {answer}, {made}"

    def made(self, answer: ClientAnswer, version: str) -> list[bool]:
        """Return, for each token, whether these weights generate it after the preceding ones."""
        text = (*answer.prompt, *answer.token_ids)
        if len(self._logprobs) > _REMEMBERED:
            self._logprobs.clear()
        if (version, text) not in self._logprobs:
            self._logprobs[version, text] = self._reference(int(version)).logprobs(text)
        logprobs = self._logprobs[version, text][len(answer.prompt) - 1 :]
        chosen = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        near = (chosen - torch.tensor(answer.logprobs)).abs() < _NEAR
        best = logprobs.max(-1).values - chosen < _NEAR
        return [bool(one) for one in near & best]
