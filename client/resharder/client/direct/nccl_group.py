"""Group of the direct path on GPUs: a communicator for each pair with traffic.

NCCL divides its 32 channels by the members of a communicator, and a message uses only its share, 8 of 32 among four members. That
would make the transfer of a dense model a third longer and that of a mixture of experts a tenth
(benchmarks/results/direct_path.md).
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from resharder.client.direct.base import DirectFailed, Exchange, PeerMessage
from resharder.client.direct.nccl_bindings import NAP, PairCommunicator
from resharder.client.gpu.streams import WorkStream

logger = logging.getLogger(__name__)
_CTAS, _LEAST_CTAS = 64, 4
_CLOSING = 5.0  # seconds; an abort takes half a second


def ctas_of(most_peers: int) -> int | None:
    """Return the multiprocessors for each communicator of a process with this many peers, or None for NCCL's choice (32).

    NCCL chooses for one or two peers. With more, NCCL's buffers should take about as much memory as for two; that was not
    measured.
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
            # The same order on all ranks, so that their waits form no cycle.
            for low, high in sorted((min(rank, peer), max(rank, peer)) for peer in peers):
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

    path = "nccl"

    def prepare(self, rounds: Sequence[Exchange]) -> None:
        """Do nothing: messages are located when they are posted."""

    def skip(self, rounds: Sequence[Exchange]) -> None:
        """Do nothing: rounds have no numbers."""

    def release(self) -> None:
        """Do nothing: no memory is held between transfers."""

    def post(self, sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], deadline: float) -> "_RecordedEvent":
        """Begin to send and receive, on one stream per pair.

        The messages follow the current stream's pending work, and its later work follows the messages. Raises DirectFailed.
        """
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
        """Raise DirectFailed, and close the group, if it was aborted or NCCL reports an error of any pair."""
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
        """Close the group, which ends messages in progress with their kernels, and return the error to raise."""
        self.abort(why)
        self.close()
        return DirectFailed(self._why)

    def abort(self, why: str) -> None:
        """Make every wait for this group raise DirectFailed. Resources are released by `close`."""
        self._why = self._why or why
        for pair, _ in self._pairs.values():
            pair.abort(self._why)  # polled by every wait

    def close(self) -> None:
        """Close all communicators at once: none could be freed while another's kernels wait for an unresponsive peer.

        Returns after `_CLOSING` seconds at the latest. Communicators that are not freed by then are logged, and freed when the
        other side closes.
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
                logger.warning("rank %d: NCCL still waits for the other side of %d pairs to close", self.rank, left)


class _RecordedEvent:
    def __init__(self, group: NcclGroup, stream: torch.cuda.Stream) -> None:
        self._group = group
        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call,unused-ignore]
        self._event.record(stream)

    def wait(self, deadline: float) -> None:
        while not self._event.query():
            self._group.check()
            if time.monotonic() > deadline:
                raise self._group.fail(f"rank {self._group.rank}: messages did not arrive in time")
            time.sleep(NAP)

    def come_before(self, stream: WorkStream, deadline: float) -> None:
        stream.after(self._event)
