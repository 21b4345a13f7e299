"""Files for versions to come: made ahead of need, given out, and used again where nobody has them open any more.

`pool/<epoch>-<n>/` has the safetensors files of one version, headers written and pages there.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition

import structlog
from resharder.converters.storage.files import FileLayout
from resharder.server.infra.filesystem import make_folder, move, touching, unused_elsewhere, write_at, write_zeros
from resharder.server.state.errors import ResourceExhausted
from resharder.server.store.manifest import READY, UPLOADING
from resharder.server.store.model_state import Room, StoredModel
from resharder.server.store.retention import peak

_log = structlog.get_logger("resharder.store")


class Pool:
    """Of all models of the store at `root`. Whoever calls it has the lock of `changed`, which is notified of all that ends."""

    def __init__(self, root: Path, changed: Condition, models: Callable[[], Iterable[StoredModel]]) -> None:
        self.limit_bytes = 0
        self._root, self._changed, self._models = root, changed, models
        self._serial = 0

    # How much fits

    def check(self, model: StoredModel, size: int, sets: int) -> None:
        """That an epoch of versions of `size` bytes fits. Raises ResourceExhausted (NO_ROOM)."""
        needed = peak(size, sets, [record.size_bytes for record in model.of(READY)])
        limit, there = self._left_for(model), self._free() + model.used()
        if needed > limit or needed > there:
            raise ResourceExhausted(
                "NO_ROOM",
                f"{model.name}: {sets} versions of {size} bytes and what is kept need {needed} bytes, the store has "
                f"{max(0, min(limit, there))} of {self.limit_bytes} for them; {self.holdings()}",
            )

    def fits(self, model: StoredModel, size: int) -> bool:
        """One more version that is not the room's."""
        return self.has_room(model, size) and size <= self._free()

    def has_room(self, model: StoredModel, size: int) -> bool:
        return model.used() + size <= self._left_for(model)

    def _left_for(self, model: StoredModel) -> int:
        return self.limit_bytes - sum(other.committed() for other in self._models() if other is not model)

    def _free(self) -> int:
        found = os.statvfs(self._root)
        return found.f_bavail * found.f_frsize

    def holdings(self) -> str:
        """Who holds what, for messages."""
        said = []
        for model in self._models():
            for record in sorted([*model.of(READY), *model.of(UPLOADING)], key=lambda r: r.number):
                by = ", ".join(sorted(model.holders.get(record.number, ()))[:4])
                said.append(f"{record.name} {record.state} {record.size_bytes} bytes" + (f" used by {by}" if by else ""))
            if model.room:
                said.append(f"models/{model.name} reserves {model.room.sets} times {model.room.size} bytes")
        return "held: " + ("; ".join(said[:16]) or "nothing")

    # Sets of files

    def drop(self, model: StoredModel) -> None:
        self.remove_stuck(model)
        room, model.room = model.room, None
        if room is not None:
            for path in room.pool:
                self.discard(model, path, room.size)
            self._changed.notify_all()

    def discard(self, model: StoredModel, path: Path, size: int) -> None:
        model.leaving += size
        model.background.submit(self._remove, model, path, size)

    def remove_stuck(self, model: StoredModel) -> None:
        """Tries again to remove what could not be removed."""
        stuck, model.stuck = model.stuck, {}
        for path, size in stuck.items():
            self.discard(model, path, size)

    def top_up(self, model: StoredModel) -> None:
        """One set ahead of need, as long as the epoch has fewer than it uses in turn."""
        room = model.room
        if room and not room.pool and not room.pending and model.sets(room) < room.sets and self.has_room(model, room.size):
            self.make_set(model, room)

    def make_set(self, model: StoredModel, room: Room) -> None:
        room.pending += 1
        room.failure = None
        model.background.submit(self._fault_in, model, room, self._next_path(model, room))

    def take_back(self, model: StoredModel, epoch: int, path: Path, size: int) -> None:
        """What a version of this epoch was made of, or away with it."""
        room = model.room
        if room is not None and room.epoch == epoch and model.sets(room) < room.sets:
            room.pending += 1
            model.background.submit(self._recycle, model, room, path)
        else:
            self.discard(model, path, size)

    def _next_path(self, model: StoredModel, room: Room) -> Path:
        while True:
            self._serial += 1
            path = model.folder / "pool" / f"{room.epoch}-{self._serial}"
            if not os.path.lexists(path):  # of an earlier daemon, where it could not be removed
                return path

    # In the model's background, without the lock

    def _remove(self, model: StoredModel, path: Path, size: int) -> None:
        shutil.rmtree(path, ignore_errors=True)
        left = os.path.lexists(path)
        if left:
            _log.error("not_removed", model=model.name, folder=str(path), bytes=size)
        with self._changed:
            model.leaving -= size
            if left:
                model.stuck[path] = size
            self._changed.notify_all()

    def _fault_in(self, model: StoredModel, room: Room, path: Path) -> None:
        failure = None
        try:
            make_folder(path)
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as writers:
                list(writers.map(lambda layout: write_zeros(path / layout.path, layout.header, layout.size), room.layouts))
        except OSError as error:
            failure = error
            _log.error("layout_failed", model=model.name, error=str(error))
        with self._changed:
            room.pending -= 1
            if failure or model.room is not room:
                room.failure = failure
                self.discard(model, path, room.size)
            else:
                room.pool.append(path)
            self._changed.notify_all()

    def _recycle(self, model: StoredModel, room: Room, path: Path) -> None:
        """Back to the pool if that is provably safe, else away."""
        try:
            with touching(path, "cleaning"):
                safe = _cleaned(path, room.layouts)
        except OSError as error:
            safe = False
            _log.error("recycling_failed", model=model.name, error=str(error))
        with self._changed:
            room.pending -= 1
            if not (safe and model.room is room and self._put_back(model, room, path)):
                self.discard(model, path, room.size)
                self.top_up(model)
            self._changed.notify_all()

    def _put_back(self, model: StoredModel, room: Room, path: Path) -> bool:
        back = self._next_path(model, room)
        try:
            make_folder(back.parent)
            move(path, back)
        except OSError as error:
            _log.error("recycling_failed", model=model.name, error=str(error))
            return False
        room.pool.append(back)
        return True


def _cleaned(path: Path, layouts: tuple[FileLayout, ...]) -> bool:
    """Whether a version's folder can be used again for one with these files; then nothing but them is left in it."""
    kept = {layout.path: layout for layout in layouts}
    for file in path.iterdir():
        if file.name not in kept:
            file.unlink()
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    # A job that is back in its epoch may have other shapes.
    same = all(sizes.get(name) == layout.size for name, layout in kept.items())
    if not same or not all(unused_elsewhere(path / name) for name in kept):
        return False
    for name, layout in kept.items():
        _write_header(path / name, layout.header)
    return True


def _write_header(path: Path, header: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        write_at(descriptor, header, 0)
    finally:
        os.close(descriptor)
