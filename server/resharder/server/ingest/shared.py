"""State and observers that the parts of ingest share."""

import threading
from collections.abc import Callable
from typing import Literal

from resharder.server.infra.change_signal import ChangeSignal
from resharder.server.ingest.homes import HomeNodes
from resharder.server.ingest.upload import Upload
from resharder.server.state.errors import FailedPrecondition, InvalidArgument, Unavailable
from resharder.server.state.version import VersionRecord
from resharder.server.store.model_state import check_model_name, taken_over
from resharder.server.store.store import Store

Phase = Literal["registration", "upload", "verify", "commit"]


class IngestObserver:
    """Observer of publishing. Methods are called with locks held and must not block."""

    def publish_phase(self, phase: Phase, model: str, seconds: float) -> None:
        """Called when a phase of a publish has ended."""

    def received(self, model: str, transport: str, size: int) -> None:
        """Called with the bytes of each chunk, and of each slot in mapped files when it is sealed."""

    def slot_sealed(self, transport: str, size: int, seconds: float) -> None:
        """Called when a slot is sealed, with its bytes and the seconds since its version began."""

    def rank_lost(self, model: str) -> None:
        """Called when the lease of a rank with an open slot expires."""

    def version_ended(self, upload: Upload, record: VersionRecord) -> None:
        """Called when a version is no longer UPLOADING."""


class IngestShared:
    """Lock, change signal, clock, nodes and observers.

    Lock order: the fleets', `lock`, the store's, a change signal's. Queries, lease renewals and waits for a version take none of
    the first three. The fleets are called while none is held.
    """

    def __init__(self, store: Store, clock: Callable[[], float], nodes: HomeNodes) -> None:
        self.store, self.clock, self.nodes = store, clock, nodes
        self.lock, self.changed = threading.RLock(), ChangeSignal()
        self.observers: list[IngestObserver] = []
        self.draining = False

    def check_not_draining(self) -> None:
        """Raise Unavailable (DRAINING) if the daemon is shutting down."""
        if self.draining:
            raise Unavailable("DRAINING", "the daemon is shutting down and accepts no new versions")

    def check_epoch(self, record: VersionRecord, epoch: int) -> None:
        """Raise FailedPrecondition (STALE_EPOCH) unless a version is of this epoch and the epoch is the model's newest."""
        claim = self.store.epochs.claim(record.model)
        if epoch != record.epoch or (claim is not None and epoch < claim.epoch):
            why = f": {taken_over(record.model, claim.job)}" if claim is not None and epoch < claim.epoch else ""
            raise FailedPrecondition("STALE_EPOCH", f"{record.name} is of epoch {record.epoch}, the call is of {epoch}{why}")


def parse_name(name: str, kind: str) -> tuple[str, int]:
    """Return the model and the number in `models/{model}/{kind}/{number}`. Raises InvalidArgument (RESOURCE_NAME)."""
    parts = name.split("/")
    if (
        len(parts) == 4
        and parts[0] == "models"
        and parts[2] == kind
        and parts[3].isascii()
        and parts[3].isdigit()
        and len(parts[3]) < 19
    ):
        return check_model_name(parts[1]), int(parts[3])
    raise InvalidArgument("RESOURCE_NAME", f"expected models/MODEL/{kind}/NUMBER, got {name[:200]!r}")
