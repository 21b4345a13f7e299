"""Publishers and versions as messages, and fields that requests of several services share."""

from collections.abc import Sequence
from typing import Any

from resharder.server.fleets.fleets import Fleets
from resharder.server.ingest.intake import Intake
from resharder.server.ingest.publisher import PublisherRecord
from resharder.server.observability.tracing.ids import Tracing
from resharder.server.rpc.convert import store_access, version_to_proto
from resharder.server.state.errors import InvalidArgument
from resharder.server.state.version import UPLOADING, VersionRecord
from resharder.v1 import resources_pb2

_MAX_WAIT = 3600.0


class Views:
    """Publishers and versions as messages."""

    def __init__(self, intake: Intake, fleets: Fleets, tracing: Tracing, data_address: str = "") -> None:
        self.intake, self.store, self.fleets, self._tracing = intake, intake.store, fleets, tracing
        self._data_address = data_address

    def publisher(self, publisher: PublisherRecord) -> resources_pb2.Publisher:
        """Convert a publisher, with its live ranks and its model's newest number."""
        live = self.intake.live_ranks(publisher)
        return resources_pb2.Publisher(
            name=publisher.name,
            model=publisher.model,
            job=publisher.job,
            epoch=publisher.epoch,
            world_size=publisher.world_size,
            state=resources_pb2.Publisher.State.Value(publisher.shown_state(live)),
            reason=f"{publisher.error.reason}: {publisher.error}" if publisher.error else "",
            registered_slots=len(publisher.registered),
            store=store_access(self.store.folder),
            lease_seconds=self.intake.lease_seconds,
            live_ranks=live,
            newest_version=self.store.catalogue.newest_number(publisher.model),
            data_address=self._data_address,
        )

    def version(self, record: VersionRecord, slots: bool = True) -> resources_pb2.Version:
        """Convert a version; with `slots`, the progress of each slot while it is UPLOADING."""
        message = version_to_proto(self.store, record, self.fleets.roster.serving(record.model, record.number))
        message.trace = self._tracing.traceparent(record)
        if record.state == UPLOADING and self.store.folder.shared:
            message.folder = str(self.store.folder.path(record))
        if slots and record.state == UPLOADING:
            for rank, sealed, size, received in self.intake.progress(record):
                state = resources_pb2.Slot.SEALED if sealed else resources_pb2.Slot.OPEN
                message.slots.add(rank=rank, state=state, size_bytes=size, received_bytes=received)
            upload = self.intake.upload(record.model, record.number)
            for home in upload.homes.homes if upload is not None else ():
                message.homes.add(node=f"nodes/{home.node}", folder=home.folder, gathers=home.gathers)
        return message


def seconds(wanted: float) -> float:
    """Return a request's bound on a wait, in seconds. Raises InvalidArgument (WAIT_SECONDS) unless it is 0 to 3600."""
    if not 0 <= wanted <= _MAX_WAIT:
        raise InvalidArgument("WAIT_SECONDS", f"expected wait_seconds of 0 to {_MAX_WAIT:.0f}, got {wanted}")
    return wanted


def page_of(items: Sequence[tuple[str, Any]], size: int, token: str) -> tuple[list[Any], str]:
    """Return the items after the one named `token`, and the token of the next page; empty on the last page.

    Args:
        items: Pairs of a unique name and an item, in order.
        size: Items of a page; 0: 100, at most 1000.
        token: Name of the last item of the previous page; empty for the first page.

    Raises InvalidArgument (PAGE_SIZE, PAGE_TOKEN).
    """
    if size < 0:
        raise InvalidArgument("PAGE_SIZE", f"expected a page size of 0 or more, got {size}")
    size = min(size or 100, 1000)
    names = [name for name, _ in items]
    if token and token not in names:
        raise InvalidArgument("PAGE_TOKEN", f"page token {token[:200]!r} is not in this list: start again")
    first = names.index(token) + 1 if token else 0
    chosen = items[first : first + size]
    return [item for _, item in chosen], chosen[-1][0] if first + size < len(items) else ""
