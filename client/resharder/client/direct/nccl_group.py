"""Group of the direct path on GPUs: a communicator for each pair with traffic.

NCCL divides 32 channels by the members of a communicator and uses only a message's share: 8 of 32 among four, which
makes the transfer of a dense model a third longer and that of a mixture of experts a tenth (benchmarks/results/direct_path.md).
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from resharder.client.direct.base import DirectFailed, PeerMessage
from resharder.client.direct.nccl_bindings import NAP, PairCommunicator
from resharder.client.gpu.streams import WorkStream

logger = logging.getLogger(__name__)
_CTAS, _LEAST_CTAS = 64, 4
_CLOSING = 5.0  # seconds; an abort takes half of one


def ctas_of(most_peers: int) -> int | None:
    """Return the multiprocessors of each communicator of a process that has this many. None, NCCL's
    choice (32), for one or two; with more, NCCL's buffers should take about as much memory as for
    two, which was not measured.
    """
    return None if most_peers <= 2 else max(_LEAST_CTAS, _CTAS // most_peers)


class NcclGroup:
    """Group of `rank` and its `peers`, each process with its own GPU."""

    def __init__(
        self, store: Any, rank: int, peers: Iterable[int], device: torch.device, timeout: float, most_peers: int
    ) -> None:
        self.rank, self._device, self._why = rank, device, ""
        self._pairs: dict[int, tuple[PairCommunicator, torch.cuda.Stream]] = {}
        deadline = time.monotonic() + timeout
        try:
            for low, high in sorted((min(rank, peer), max(rank, peer)) for peer in peers):  # all in one order: no cycle of waits
                within = torch._C._distributed_c10d.PrefixStore(f"pair {low} {high}", store)
                peer, left = (high if low == rank else low), max(0.001, deadline - time.monotonic())
                pair = PairCommunicator(within, rank, peer, device, left, ctas_of(most_peers))
                stream: Any = torch.cuda.Stream(device, priority=-2)  # type: ignore[no-untyped-call,unused-ignore]
                self._pairs[peer] = pair, stream
        except BaseException as error:
            self.abort(str(error))
            self.close()
            raise
        self.size = 1 + len(self._pairs)

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> "_RecordedEvent":
        self.check()
        here = torch.cuda.current_stream(self._device)
        begun = []
        for peer, (pair, stream) in self._pairs.items():
            out, into = ([part.memory for part in parts if part.peer == peer] for parts in (sends, receives))
            if out or into:
                stream.wait_stream(here)
                with self._failing_together():
                    pair.post(out, into, stream, deadline)
                begun.append(stream)
        for stream in begun:
            here.wait_stream(stream)
        return _RecordedEvent(self, here)

    def check(self) -> None:
        with self._failing_together():
            for pair, _ in self._pairs.values():
                pair.check()
        if self._why:
            raise self.fail(self._why)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except DirectFailed as error:
            raise self.fail(str(error)) from error

    def fail(self, why: str) -> DirectFailed:
        """End messages in progress, kernels included."""
        self.abort(why)
        self.close()
        return DirectFailed(self._why)

    def abort(self, why: str) -> None:
        self._why = self._why or why
        for pair, _ in self._pairs.values():
            pair.abort(self._why)  # polled by every wait

    def close(self) -> None:
        """Close all communicators at once: none could be freed while another's kernels wait for an
        unresponsive peer. Returns after `_CLOSING` seconds at the latest; what is not freed by then
        is freed when the other side closes, and logged.
        """
        self._why = self._why or "the group is closed"
        closing = [threading.Thread(target=pair.close, name="resharder-nccl", daemon=True) for pair, _ in self._pairs.values()]
        deadline = time.monotonic() + _CLOSING
        with suppress(RuntimeError):  # no thread starts at interpreter exit
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join(max(0.0, deadline - time.monotonic()))
            if left := sum(thread.is_alive() for thread in closing):
                logger.warning("rank %d: NCCL still waits for the other side of %d pairs", self.rank, left)


class _RecordedEvent:
    def __init__(self, group: NcclGroup, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
        self._event.record(stream)

    def wait(self, deadline: float) -> None:
        while not self._event.query():
            self._group.check()
            if time.monotonic() > deadline:
                raise self._group.fail(f"rank {self._group.rank}: the messages did not arrive in time")
            time.sleep(NAP)

    def come_before(self, stream: WorkStream, deadline: float) -> None:
        stream.after(self._event)
