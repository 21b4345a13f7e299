"""The lease by which one of several daemons is the one of a registry.

A lease is a small record that all of them can read, and that only one of them can change at a time: a file on shared storage
(`lease_file.py`), or a Lease of Kubernetes (`kubernetes_lease.py`). No clocks are compared between hosts:

- The holder writes the record anew every third of the lease. Its lease counts from before the last write that succeeded, by its
  own clock. If none succeeds in time, it ends while a tenth of the lease is left.
- A standby takes the record once it has not changed for a whole lease by the standby's own clock, or was released. It writes a
  higher term, which everybody checks in each call: a holder that was stopped, and continues later, is not believed.

    STANDBY ──unchanged for a lease, or released──► HELD ──another holder, or no write in time──► the process ends
                                                     └──────stop──────► released
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

_RENEWALS = 3  # in one lease
_MARGIN = 0.1  # of the lease, in which a holder that could not renew it has ended
_LOOKS = 20  # of a standby in one lease
_log = structlog.get_logger("resharder.standby")


@dataclass(frozen=True)
class LeaseRecord:
    """Content of a lease. `term` and `holder` change with the holder, `renewals` with each renewal.

    `holder` is empty once it was released. `version` is that of the store of records, for a conditional change.
    """

    term: int
    holder: str
    renewals: int = 0
    version: str = ""


class LeaseConflict(Exception):
    """Another daemon has changed the lease since it was read."""


class LeaseStore(Protocol):
    """Where a lease's record is. The methods raise OSError if it cannot be reached."""

    @property
    def place(self) -> str:
        """Name of the place, for messages."""

    def read(self) -> LeaseRecord | None:
        """Return the record; None before the first holder."""

    def write(self, before: LeaseRecord | None, after: LeaseRecord) -> LeaseRecord:
        """Replace the record `before`, and return the new one as it is read. Raises LeaseConflict if it has changed."""


def boot_clock() -> float:
    """Return seconds that also pass while the host is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Lease:
    """A lease on a store of records. One thread calls `acquire`, `start` and `release`, in this order.

    Args:
        store: The store.
        holder: Name of this process, different from that of any other one.
        seconds: Duration of the lease; the same for all daemons.
        lost: Function that ends the process, called with the reason.
        clock: Seconds of a clock of this host.
    """

    def __init__(
        self,
        store: LeaseStore,
        holder: str,
        seconds: float,
        lost: Callable[[str], object],
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._store, self._holder, self._seconds, self._lost, self._clock = store, holder, seconds, lost, clock
        self._seen: LeaseRecord | None = None  # by a standby, the same since `_since`
        self._since = 0.0
        self._record: LeaseRecord | None = None  # while it is held
        self._until = 0.0
        self._problem = ""
        self._ended = threading.Event()
        self._renewing = threading.Thread(target=self._renew_loop, name="lease", daemon=True)
        self._watching = threading.Thread(target=self._watch_loop, name="lease-end", daemon=True)

    @property
    def term(self) -> int:
        """Term of this holder; 0 before it is one."""
        return self._record.term if self._record else 0

    def acquire(
        self, above: Callable[[], int], ended: threading.Event, standby: Callable[[str], object], *, at_once: bool = False
    ) -> bool:
        """Wait until this process holds the lease. Returns False if `ended` is set before.

        Args:
            above: Function that returns a term which the one of this holder has to exceed.
            ended: Ends the wait.
            standby: Called with the reason for which this process waits, whenever it is another one.
            at_once: Take the lease from its holder, as an operator wants it.
        """
        reported = ""
        while not ended.is_set():
            if not (reason := self.take(above, at_once=at_once)):
                _log.info("lease_held", lease=self._store.place, term=self.term, seconds=self._seconds)
                return True
            if reason != reported:
                standby(reason)
                reported = reason
            ended.wait(self._seconds / _LOOKS)
        return False

    def take(self, above: Callable[[], int], *, at_once: bool = False) -> str:
        """Take the lease if nobody holds it; return why not, or an empty text. A standby calls this again and again."""
        now = self._clock()
        try:
            found = self._store.read()
            if found != self._seen:
                self._seen, self._since = found, now
            if found is not None and found.holder and now - self._since <= self._seconds and not at_once:
                return f"{found.holder} holds {self._store.place} in term {found.term}"
            term = max(found.term if found else 0, above()) + 1
            self._record, self._until = self._store.write(found, LeaseRecord(term, self._holder)), now + self._seconds
        except LeaseConflict:
            return f"another daemon has just taken {self._store.place}"
        except OSError as error:
            self._seen = None  # it may have changed meanwhile
            return f"{self._store.place} cannot be used: {error}"
        return ""

    def renew(self) -> None:
        """Renew the lease that this process holds. Raises LeaseConflict once another one does, OSError if it cannot tell."""
        assert self._record is not None
        now = self._clock()
        self._record = self._store.write(self._record, replace(self._record, renewals=self._record.renewals + 1))
        self._until = now + self._seconds

    @property
    def expires(self) -> bool:
        """Whether so little of the lease is left that its holder ends."""
        return self._clock() > self._until - self._seconds * _MARGIN

    def start(self) -> None:
        """Renew the lease from now on, and call `lost` once it is lost."""
        self._renewing.start()
        self._watching.start()

    def release(self) -> None:
        """Let a standby take the lease at once. The process may not act as the daemon any more."""
        self._ended.set()
        self._renewing.join(timeout=self._seconds)
        if self._record is None:
            return
        try:
            self._store.write(self._record, replace(self._record, holder=""))
        except (OSError, LeaseConflict) as error:
            _log.warning("lease_not_released", lease=self._store.place, reason=str(error))

    def _renew_loop(self) -> None:
        pause = usual = self._seconds / _RENEWALS
        while not self._ended.wait(pause):
            try:
                self.renew()
            except LeaseConflict as error:
                self._end(f"another daemon has taken {self._store.place}: {error}")
            except OSError as error:
                self._problem, pause = str(error), usual / 4
                _log.warning("lease_not_renewed", lease=self._store.place, reason=self._problem)
            else:
                self._problem, pause = "", usual

    def _watch_loop(self) -> None:
        """End the process before its lease does: on a thread of its own, for a write may hang."""
        while not self._ended.wait(min(0.1, self._seconds / 50)):
            if self.expires:
                why = f" ({self._problem})" if self._problem else ""
                left = self._seconds * (1 - _MARGIN)
                self._end(f"{self._store.place} could not be renewed for {left:g} s{why}: another daemon may hold it by now")

    def _end(self, reason: str) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._lost(f"{reason}. This daemon ends; start it again as a standby")
