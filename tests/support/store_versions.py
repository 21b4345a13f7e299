"""Versions that are published directly into a store."""

from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.state.version import READY, VersionRecord
from resharder.server.store.catalogue import Reservation
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.store import Store

SPECS = [TensorSpec("a", "BF16", (64, 64)), TensorSpec("b", "F32", (16,))]
LAYOUTS = lay_out(SPECS)
SIZE = sum(layout.size for layout in LAYOUTS)
FILES = {"config.json": b"{}", "tokenizer.json": b"[]"}


def claim(store: Store, job: str = "job", model: str = "policy") -> int:
    epoch = store.epochs.begin(model, job, 1).epoch
    store.epochs.reserve(NewEpoch(model, epoch, LAYOUTS, FILES))
    return epoch


def publish(store: Store, epoch: int, step: int, model: str = "policy") -> VersionRecord:
    record = store.lifecycle.begin(model, epoch, step, "job")
    with MappedFiles(store.folder.path(record), LAYOUTS, writable=True) as files:
        digests = {}
        for spec in SPECS:
            files.arrays[spec.name][...] = step + 1
            digests[spec.name] = digest(files.arrays[spec.name], full_box(spec.shape), spec.shape)
    return store.lifecycle.commit(record, digests, ((0, "00"),))


def numbers(store: Store, state: str = READY) -> list[int]:
    return [record.number for record in store.catalogue.versions("policy") if record.state == state]


def settle(store: Store, *, released: bool = False) -> None:
    """Wait until the store's background work has ended; with `released`, until no process has files of a retired version open."""

    def busy(reservation: Reservation | None) -> bool:
        return reservation is not None and bool(reservation.pending or (released and reservation.held))

    with store.catalogue.changed:
        model = store.catalogue.model("policy")
        assert store.catalogue.changed.wait_for(lambda: not model.leaving and not busy(model.reservation), 60)


def ready_version(store: Store) -> VersionRecord:
    """Return a READY version whose bytes are zeros."""
    record = store.lifecycle.begin("policy", claim(store), 1, "job")
    return store.lifecycle.commit(record, {spec.name: 0 for spec in SPECS}, ())
