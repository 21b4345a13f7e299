"""Ranks on an emulated host, in one process: for each line of JSON `[method, arguments]`, a line with the result.

with HomeRanks(hidden=[other.root]) as ranks:   # cannot read what is in `hidden`
    ranks.call("attach", endpoint, "job", {0: rows, 1: rows}, 4)
    ranks.call("publish", 1)
"""

import json
import subprocess
import sys
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from resharder.client import Publisher, connect
from resharder.client.trainer import registration

from tests.support.hidden import hiding
from tests.support.staging_process import stage

CONFIG = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"], "hidden_size": 32}
Rows = Sequence[tuple[Any, ...]]
"""Name and shape of each tensor of which a rank has rows, the first row and the number of rows. Columns, with 1 after it."""


def weights(name: str, shape: Sequence[int], step: int) -> torch.Tensor:
    """The values of a tensor of a step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(tuple(shape), generator=generator).to(torch.bfloat16)


def index(at: int, count: int, dimension: int = 0) -> tuple[slice, ...]:
    """Return the index of `count` rows, or of what another dimension has, from `at` on."""
    return (*(slice(None),) * dimension, slice(at, at + count))


class Ranks:
    """The methods that run in the process."""

    def __init__(self) -> None:
        self._rows: dict[str, Rows] = {}
        self._publishers: dict[str, Publisher] = {}

    def attach(self, endpoint: str, job: str, ranks: dict[str, Rows], world_size: int, **options: Any) -> None:
        self.close()
        self._rows = ranks
        for rank, rows in ranks.items():
            self._publishers[rank] = connect(
                endpoint, model="policy", job=job, rank=int(rank), world_size=world_size, config=CONFIG, **options
            )
            declared = [(name, torch.bfloat16, tuple(shape), index(*part)) for name, shape, *part in rows]
            self._publishers[rank].attach_tensors(declared, wait=False)

    def publish(self, step: int, only: Sequence[str] = (), *, once: bool = False, spoil: Sequence[Any] = ()) -> list[list[str]]:
        """Return the version, transport and reason of each rank.

        `spoil`: file and offset of a byte that changes before the last rank writes its tensors.
        """

        def items(rank: str) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
            if spoil and rank == max(self._rows):
                change_byte(*spoil)
            for name, shape, *part in self._rows[rank]:
                yield name, index(*part), weights(name, shape, step)[index(*part)]

        found = []
        for rank in only or self._rows:
            handle = self._publishers[rank].publish_tensors(step, items(rank) if once else partial(items, rank))
            found.append([handle.name, handle.transport, handle.transport_reason])
        return found

    def wait(self, step: int) -> None:
        """Wait until the last version is READY."""
        for publisher in self._publishers.values():
            newest = publisher._session.newest
            if newest is None or newest.step != step:
                raise AssertionError(f"expected step {step} as the last one, found {newest}")
            newest.wait_ready(60)

    def wait_for_nodes(self, seconds: float) -> float:
        """Set how long a rank waits for nodes to report to a daemon that has restarted; return how long it was before."""
        before, registration._NODE_SECONDS = registration._NODE_SECONDS, seconds
        return before

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()

    def stage(self, endpoint: str, version: str) -> dict[str, object]:
        """Stage a version as a worker on this host."""
        return stage(endpoint, version)


def change_byte(path: str, offset: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


class HomeRanks:
    """The process of some ranks, on which `call` may block.

    Args:
        hidden: Folders that are empty to it.
        command: Wrapper of its command line, as for a network namespace.
        program: Arguments of Python, of a program that calls `serve`.
    """

    def __init__(
        self,
        hidden: Sequence[Path],
        command: Sequence[str] = ("unshare", "--mount"),
        program: Sequence[str] = ("-m", "tests.support.home_rank"),
    ) -> None:
        arguments = [*hiding(hidden, command), sys.executable, *program]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Return a method's result. Raises RuntimeError with the type and message of an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, args, options]), file=self._process.stdin, flush=True)
        result, error = json.loads(self._process.stdout.readline())
        if error:
            raise RuntimeError(error)
        return result

    def __enter__(self) -> "HomeRanks":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()


def serve(role: object) -> None:
    """Answer calls of an object's methods from the input until it ends."""
    for line in sys.stdin:
        method, args, options = json.loads(line)
        try:
            answer = [getattr(role, method)(*args, **options), ""]
        except Exception as error:
            answer = [None, f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(Ranks())
