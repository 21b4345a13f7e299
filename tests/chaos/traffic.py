"""Clients that ask each server continuously, and the comparison of every token with a torch reference."""

import queue
import threading
import time
from dataclasses import replace
from functools import lru_cache
from itertools import cycle

from tests.chaos.adapter import ADAPTER, adapter_weights, merged
from tests.chaos.history import History
from tests.chaos.system import CONFIG, System
from tests.support.client_traffic import PROMPTS, ClientAnswer, FailedRequest, Judge, ask
from tests.support.weights import Reference, random_weights

ASKED = (*PROMPTS, [(37 * at) % 900 + 20 for at in range(180)])
"""The last prompt fills a block of the prefix cache, so that stale entries would be seen."""
LENGTHS = {"short": (8, 0.4), "long": (60, 1.5), ADAPTER: (24, 0.7)}
"""Tokens of an answer and seconds between two requests, for each client; the last one asks the adapter."""
_UNKNOWN_SECONDS = 30.0  # for the step of a version to become known


class Traffic:
    """Two clients of each server, and one thread that compares their answers.

    Attributes:
        compared: Answers compared so far.
        tokens: Their tokens.
    """

    def __init__(self, system: System, history: History) -> None:
        self.compared, self.tokens = 0, 0
        self._system, self._history = system, history
        self._queue: queue.Queue[tuple[str, float, float, ClientAnswer]] = queue.Queue()
        reference = lru_cache(12)(lambda step: Reference(CONFIG, random_weights(CONFIG, step)))
        self._judge = Judge(lambda version: reference(system.steps[version]))
        self._adapted = lru_cache(24)(self._judge_of)
        self._ended = threading.Event()
        kinds = [kind for kind in LENGTHS if kind != ADAPTER or system.adapter is not None]
        clients = [(name, kind) for name in system.servers for kind in kinds]
        self._threads = [threading.Thread(target=self._client, args=pair, daemon=True) for pair in clients]
        self._comparing = threading.Thread(target=self._compare, daemon=True)

    def open(self) -> None:
        """Start to ask."""
        for thread in (*self._threads, self._comparing):
            thread.start()

    def close(self) -> None:
        """Stop asking, and compare what is left."""
        self._ended.set()
        for thread in self._threads:
            thread.join(330)
        if not self.drain(600):
            self._history.record("trouble", text=f"{self._queue.unfinished_tasks} answers were not compared")
            self._queue.queue.clear()
        self._queue.put(None)  # type: ignore[arg-type]
        self._comparing.join()

    def drain(self, timeout: float) -> bool:
        """Wait until every answer so far is compared; return whether it is, within `timeout` seconds."""
        end = time.monotonic() + timeout
        while self._queue.unfinished_tasks and time.monotonic() < end:
            time.sleep(0.1)
        return not self._queue.unfinished_tasks

    def _client(self, name: str, kind: str) -> None:
        tokens, pause = LENGTHS[kind]
        keeper = self._system.keepers[name]
        for prompt in cycle(ASKED):
            if self._ended.is_set():
                return
            if not keeper.running.wait(1):
                continue
            began = self._history.now
            model = {"model": ADAPTER} if kind == ADAPTER else {}
            found = ask(name, self._system.servers[name].server, prompt, tokens, **model)
            if isinstance(found, ClientAnswer):
                self._queue.put((kind, began, self._history.now, found))
            elif not self._ended.is_set():
                self._turned(kind, began, found)
            self._ended.wait(pause if isinstance(found, ClientAnswer) else 2 * pause)

    def _turned(self, kind: str, began: float, found: FailedRequest) -> None:
        fields = {"client": kind, "server": found.server, "began": round(began, 3)}
        self._history.record("turned", **fields, status=found.status, reason=found.reason[:500])

    def _compare(self) -> None:
        while (one := self._queue.get()) is not None:
            try:
                self._record(*one)
            except Exception as error:
                self._history.record("trouble", text=f"cannot compare {one}: {type(error).__name__}: {error}")
            finally:
                self._queue.task_done()

    def _judge_of(self, adapter: int) -> Judge:
        """Return the judge of answers by a version of the adapter, beside any of the base."""
        assert self._system.adapter is not None
        tensors = adapter_weights(CONFIG, self._system.adapter.steps[adapter])
        reference = lru_cache(6)(lambda step: Reference(CONFIG, merged(random_weights(CONFIG, step), tensors)))
        return Judge(lambda version: reference(self._system.steps[version]))

    def _record_adapted(self, began: float, ended: float, answer: ClientAnswer) -> None:
        bases, _, label = ",".join(answer.versions).partition(";")
        name, _, number = label.partition("=")
        known = self._system.adapter.steps if self._system.adapter is not None else {}
        while number.isdigit() and int(number) not in known and self._history.now < ended + _UNKNOWN_SECONDS:
            time.sleep(0.1)
        right = name == ADAPTER and number.isdigit() and int(number) in known
        judge = self._adapted(int(number)) if right else None
        answer = replace(answer, versions=tuple(bases.split(",")))
        nothing = [False] * len(answer.token_ids)
        made = {version: self._made(answer, version, ended, judge) if judge else nothing for version in answer.versions}
        self.compared, self.tokens = self.compared + 1, self.tokens + len(answer.token_ids)
        fields = {"server": answer.server, "began": round(began, 3), "ended": round(ended, 3), "adapter": label}
        wrong = {} if all(map(all, made.values())) else {"ids": answer.token_ids, "logprobs": answer.logprobs}
        made_bits = {version: "".join("01"[one] for one in tokens) for version, tokens in made.items()}
        self._history.record("adapted", **fields, versions=answer.versions, made=made_bits, prompt=answer.prompt[:3], **wrong)

    def _record(self, kind: str, began: float, ended: float, answer: ClientAnswer) -> None:
        if kind == ADAPTER:
            self._record_adapted(began, ended, answer)
            return
        made = {version: self._made(answer, version, ended) for version in answer.versions}
        self.compared, self.tokens = self.compared + 1, self.tokens + len(answer.token_ids)
        fields = {"client": kind, "server": answer.server, "began": round(began, 3), "ended": round(ended, 3)}
        wrong = {} if all(map(all, made.values())) else {"ids": answer.token_ids, "logprobs": answer.logprobs}
        made_bits = {version: "".join("01"[one] for one in tokens) for version, tokens in made.items()}
        self._history.record("answer", **fields, versions=answer.versions, made=made_bits, prompt=answer.prompt[:3], **wrong)

    def _made(self, answer: ClientAnswer, version: str, ended: float, judge: Judge | None = None) -> list[bool]:
        """Return which tokens a version made; none of them if the version is unknown."""
        if not version.isdigit():
            return [False] * len(answer.token_ids)
        while int(version) not in self._system.steps and self._history.now < ended + _UNKNOWN_SECONDS:
            time.sleep(0.1)
        if int(version) not in self._system.steps:
            return [False] * len(answer.token_ids)
        return (judge or self._judge).made(answer, version)
