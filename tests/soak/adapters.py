"""Many versions of many adapters on one real server: `python -m tests.soak.adapters --adapters 100 --every 2 --seconds 120`.

Publishers publish a version of each adapter every `--every` seconds, or when the one before is served; clients ask for adapters
all the time. Every label is compared with the tokens: the weights of a version are one of `VARIANTS`, by the adapter and the
version's number, and an engine that loaded them from their folder has answered before. Meanwhile the memory, descriptors and
threads of every process, the slots and vLLM's caches in the workers, files in /dev/shm, and the page of metrics are sampled.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from resharder.client import connect
from resharder.client.errors import ResharderError
from resharder.client.inference.version_page import Page
from resharder.client.trainer.publisher import Publisher
from safetensors.torch import load_file

from tests.soak.report import table
from tests.soak.sampler import descriptors, memory, named
from tests.soak.verdict import FEWEST, Growth, Sample, judge
from tests.support.adapters import RANK, save_adapter
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.tiny_hf import load_checkpoint
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import make_pair, publish, without_weights
from tests.support.vllm_server import VllmServer, completion

PROMPT = [5, 6, 7, 8, 9, 10]
SERVER = f"load-{os.getpid()}"
VARIANTS = 7
SHORT, LONG = 4, 48
"""Tokens of a request; a long one outlives installs."""
SHARED = Path("/dev/shm")
RAW_MODE = Path(__file__).parents[1] / "support" / "raw_mode"
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK, "dtype": "float32"}


def variant(adapter: int, version: int) -> int:
    """The weights of a version."""
    return (adapter + version) % VARIANTS


@dataclass
class Result:
    """Outcome of a run."""

    published: int = 0
    answered: int = 0
    """Versions that a label named, of all adapters."""
    served: int = 0
    """Versions that new requests got, as far as looks every 50 ms tell."""
    seconds: float = 0.0
    answers: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    """Seconds from `publish` until new requests get the version."""
    counts: dict[str, int] = field(default_factory=dict)
    """The worker's counts at the end, after the last release."""

    def growths(self) -> list[Growth]:
        return judge(self.samples)


class Load:
    """A daemon, a base, and a server that follows `adapters` adapters of it.

    Args:
        folder: For checkpoints and logs.
        adapters: Number of adapters.
        every: Seconds from one version of an adapter to its next; 0 for when the one before is served.
        readers: Number of clients.
        spare: Slots of the server beyond one for each adapter.
        publishers: Threads that publish, each for its share of the adapters.
    """

    def __init__(self, folder: Path, adapters: int, every: float, readers: int = 3, spare: int = 4, publishers: int = 2) -> None:
        self.result, self._folder, self._every, self._readers = Result(), folder, every, readers
        self._names = [f"lora-{index}" for index in range(adapters)]
        self._slots, self._publishers = adapters + spare, min(publishers, adapters)
        self._stack, self._ended, self._lock = ExitStack(), threading.Event(), threading.Lock()
        self._published_at = dict[tuple[int, int], float]()
        self._seen, self._newest = set[tuple[int, int]](), Counter[int]()

    def __enter__(self) -> "Load":
        base, _ = make_pair(self._folder, "qwen3", torch.float32)
        checkpoint = load_checkpoint(base)
        folders = [save_adapter(self._folder / f"adapter{seed}", checkpoint, seed) for seed in range(VARIANTS)]
        with Engine(base, environment={"VLLM_PLUGINS": ""}, **LORA) as fresh:
            self._expected = [[token for token, _ in fresh.logprobs(PROMPT, LONG, each)] for each in folders]
        assert len({tuple(tokens[:SHORT]) for tokens in self._expected}) == VARIANTS
        self._tensors = [load_file(each / "adapter_model.safetensors") for each in folders]
        config = json.loads((folders[0] / "adapter_config.json").read_text())
        try:
            self.daemon = self._stack.enter_context(Daemon())
            publish(self.daemon, "policy", base)
            self._trainers = [
                self._stack.enter_context(
                    connect(
                        self.daemon.endpoint,
                        model=name,
                        base="policy",
                        job=uuid.uuid4().hex,
                        rank=0,
                        world_size=1,
                        config=config,
                        max_ahead=None if self._every else 1,
                    )
                )
                for name in self._names
            ]
            args = ["--load-format", "resharder", "--enable-lora", "--max-loras", str(self._slots), "--max-lora-rank", str(RANK)]
            args += ["--max-cpu-loras", str(self._slots)]
            environment = {
                "RESHARDER_ENDPOINT": self.daemon.endpoint,
                "RESHARDER_MODEL": "policy",
                "RESHARDER_SERVER_ID": SERVER,
                "RESHARDER_ADAPTERS": ",".join(self._names),
                "VLLM_PLUGINS": "resharder,adapter_counts",
                "PYTHONPATH": str(RAW_MODE),
                "ADAPTER_COUNTS": str(self._folder / "counts"),
            }
            bare = without_weights(base, self._folder / "bare")
            self.server = self._stack.enter_context(VllmServer(bare, args=args, env=environment, log=self._folder / "server.log"))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._stack.close()

    def run(self, *, seconds: float = float("inf"), versions: int = 0, period: float = 2.0) -> Result:
        """Publish, ask and sample for `seconds`, or until `versions` versions of each adapter are served."""
        self._period, self._until = period, time.monotonic() + seconds
        acts = [lambda share=share: self._publish(share, versions) for share in range(self._publishers)]
        publishing = [threading.Thread(target=self._noting, args=(act,)) for act in acts]
        others = (*[self._ask] * self._readers, self._sample, self._watch)
        beside = [threading.Thread(target=self._noting, args=(act,)) for act in others]
        began = time.monotonic()
        for thread in (*publishing, *beside):
            thread.start()
        for thread in publishing:
            thread.join()
        self.result.seconds = time.monotonic() - began
        newest = {index: max(version for at, version in self._published_at if at == index) for index in range(len(self._names))}
        with suppress(TimeoutError):
            wait_until(lambda: all(self._newest[index] == newest[index] for index in newest), "all are served", 60)
        self._ended.set()
        for thread in beside:
            thread.join()
        if behind := {index: (self._newest[index], newest[index]) for index in newest if self._newest[index] != newest[index]}:
            self.result.problems.append(f"not served a minute after the last was published: {behind}")
        wanted = {"slots": len(newest), "active": len(newest), "registered": len(newest)}
        with suppress(TimeoutError):
            wait_until(lambda: self._counts().items() >= wanted.items(), "superseded versions are released", 20)
        self.result.counts, self.result.answered = self._counts(), len(self._seen)
        if not self.result.counts.items() >= wanted.items():
            self.result.problems.append(f"the worker holds {self.result.counts}, expected {wanted}")
        return self.result

    # On threads

    def _noting(self, act: Any) -> None:
        try:
            act()
        except Exception as error:
            self.result.problems.append(f"{type(error).__name__}: {error}")

    def _publish(self, share: int, versions: int) -> None:
        own = [index for index in range(len(self._names)) if index % self._publishers == share]
        step = 0
        while time.monotonic() < self._until and (not versions or step < versions):
            step, began = step + 1, time.monotonic()
            for place, index in enumerate(own):
                time.sleep(max(0.0, began + place * self._every / len(own) - time.monotonic()))
                self._publish_one(self._trainers[index], index, step)
            time.sleep(max(0.0, began + self._every - time.monotonic()))

    def _publish_one(self, trainer: Publisher, index: int, step: int) -> None:
        number = step  # nothing else publishes, and no version is aborted
        self._published_at[index, number] = time.monotonic()
        handle = trainer.publish_tensors(step, self._tensors[variant(index, number)].items())
        if handle.version != number:
            raise ResharderError(f"expected version {number} of {self._names[index]}, got {handle.version}")
        self.result.published += 1
        if not self._every:
            handle.wait_serving(60)
            self._ask_one(index, SHORT)
            if self._newest[index] != number:
                self.result.problems.append(f"{handle.name} serves, and requests get version {self._newest[index]}")

    def _ask(self) -> None:
        draw = random.Random()
        while not self._ended.is_set():
            self._ask_one(draw.randrange(len(self._names)), LONG if draw.random() < 0.2 else SHORT)

    def _ask_one(self, index: int, tokens: int) -> None:
        """Ask an adapter for tokens, and compare the answer with the version of its label."""
        name = self._names[index]
        answer = self.server.request("POST", "/v1/completions", completion(PROMPT, tokens, model=name))
        if answer.status != 200:
            if answer.status != 503 or self._newest[index]:
                self.result.refused[f"{answer.status} {answer.body[:200]!r}"] += 1
            return
        label, found = answer.version or "", answer.json()["choices"][0]["token_ids"]
        version = label.removeprefix(f"1;{name}=")
        self.result.answers += 1
        if not version.isdecimal():
            self.result.problems.append(f"{name}: label {label}")
        elif found != self._expected[variant(index, int(version))][:tokens]:
            self.result.problems.append(f"{label}: other tokens than its version's: {found}")
        else:
            self._note(index, int(version))

    def _note(self, index: int, version: int) -> None:
        with self._lock:
            self._seen.add((index, version))
            self._newest[index] = max(version, self._newest[index])

    def _watch(self) -> None:
        """Look which version new requests get, on the pages that the server's processes share."""
        pages, seen = dict[int, Page](), Counter[int]()
        while not self._ended.wait(0.05):
            for index, name in enumerate(self._names):
                if index not in pages and (found := list(SHARED.glob(f"resharder-page-{SERVER}-*.{name}"))):
                    pages[index] = Page(found[0])
                version = pages[index].read().last if index in pages else 0
                if version > seen[index]:
                    seen[index] = version
                    self.result.served += 1
                    self.result.lag.append(time.monotonic() - self._published_at[index, version])
        for page in pages.values():
            page.close()

    def _sample(self) -> None:
        while not self._ended.wait(self._period):
            self.result.samples += self._samples()

    def _samples(self) -> Iterator[Sample]:
        for owner, process in (("daemon", self.daemon.pid), ("server", self.server._process().pid)):
            main, seen = psutil.Process(process), Counter[str]()
            for one in [main, *main.children(recursive=True)]:
                with suppress(psutil.Error, OSError, KeyError):
                    name = named(owner, " ".join(one.cmdline()), one, main.pid)
                    seen[name] += 1
                    name = name if seen[name] == 1 else f"{name} {seen[name]}"
                    yield Sample(name, self.result.published, memory(one.pid) | descriptors(one.pid))
        pages = list(SHARED.glob(f"resharder-page-{SERVER}-*"))
        measures: dict[str, float] = {"held files": len(pages), "held bytes": sum(page.stat().st_size for page in pages)}
        if len(self._names) == 1:  # vLLM's `vllm:lora_requests_info` has a line for each set of adapters that ever ran together
            measures["metrics bytes"] = len(self.server.request("GET", "/metrics").body)
        yield Sample("files", self.result.published, measures)
        yield Sample("worker's counts", self.result.published, {name: float(n) for name, n in self._counts().items()})

    def _counts(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self._folder / "counts.0").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.soak.adapters", description=__doc__)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--every", type=float, default=2.0, help="seconds from one version of an adapter to its next")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--versions", type=int, default=0, help="end after this number of versions of each adapter")
    parser.add_argument("--spare", type=int, default=32, help="slots of the server beyond one for each adapter")
    parser.add_argument("--readers", type=int, default=3, help="clients that ask all the time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resharder-adapters-") as folder:
        with Load(Path(folder), given.adapters, given.every, given.readers, given.spare) as load:
            seconds = float("inf") if given.versions else given.seconds
            result = load.run(seconds=seconds, versions=given.versions)
        if result.problems:
            print((Path(folder) / "server.log").read_text()[-4000:])
    return report(result, given.adapters)


def report(result: Result, adapters: int) -> int:
    """Print what was done and what went wrong, and return the number of problems."""
    wanted = result.published / result.seconds
    print(f"{result.published} versions of {adapters} adapters in {result.seconds:.0f} s: {wanted:.1f} a second")
    lag = sorted(result.lag)
    if lag:
        print(f"{result.served} of them served: {result.served / result.seconds:.1f} a second; ", end="")
        print(f"publish to served: median {lag[len(lag) // 2]:.2f} s, longest {lag[-1]:.2f} s")
    print(f"{result.answers} answers of {result.answered} versions compared, refused: {dict(result.refused)}")
    print(f"the worker holds {result.counts}")
    problems: Sequence[str] = result.problems
    if len({sample.versions for sample in result.samples}) > FEWEST:
        growths = result.growths()
        print(table(growths))
        problems = [*problems, *(f"{each.process}: {each.measure}" for each in growths if each.exceeded)]
    print(*problems[:20], f"{len(problems)} problems", sep="\n")
    return min(len(problems), 100)


if __name__ == "__main__":
    sys.exit(main())
