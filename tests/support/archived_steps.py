"""Steps of a small model in a store, to archive as deltas, and harm that is done to archived objects."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from resharder.converters.geometry.layout import TensorSpec, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, lay_out
from resharder.server.archive import archived as markers
from resharder.server.archive import checkpoints
from resharder.server.state.version import VersionRecord
from resharder.server.store.epochs import NewEpoch
from resharder.server.store.store import Store

PIECE = 4096
SPECS = [TensorSpec("w", "BF16", (64, 100)), TensorSpec("s", "F32", (33,)), TensorSpec("q", "F8_E4M3", (50, 70))]
LAYOUTS = lay_out(SPECS, 9000)
HARM = ("missing", "cut", "longer", "flipped", "another", "earlier")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several pieces."""
    monkeypatch.setattr(checkpoints, "PIECE", PIECE)
    monkeypatch.setattr(markers, "PIECE", PIECE)


class Trainer:
    """Publishes steps of a model: each changes a few elements of each tensor."""

    def __init__(self, store: Store, seed: int = 0, job: str = "job") -> None:
        self.store, self.job, self.random = store, job, np.random.default_rng(seed)
        self.weights = {spec.name: self.random.integers(0, 256, spec.size, np.uint8) for spec in SPECS}
        self.epoch = store.epochs.begin("policy", job, 1).epoch
        store.epochs.reserve(NewEpoch("policy", self.epoch, LAYOUTS, {"config.json": b"{}"}))

    def publish(self, step: int, *, skipped: bool = False) -> VersionRecord:
        record, digests = self.store.lifecycle.begin("policy", self.epoch, step, self.job, skipped=skipped), {}
        with MappedFiles(self.store.folder.path(record), LAYOUTS, writable=True) as files:
            for spec in SPECS:
                weights = self.weights[spec.name]
                weights[self.random.random(weights.size) < 0.02] ^= 3
                files.arrays[spec.name][...] = weights.view(files.arrays[spec.name].dtype).reshape(spec.shape)
                digests[spec.name] = digest(files.arrays[spec.name], full_box(spec.shape), spec.shape)
        return self.store.lifecycle.commit(record, digests, ())


def content(store: Store, record: VersionRecord) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.folder.path(record).iterdir()}


def place(root: Path, number: int) -> Path:
    folder = root / "archive" / "policy" / f"{number:08}"
    return folder / json.loads((folder / "archived.json").read_bytes())["folder"]


def spoil(path: Path, how: str, others: Path) -> None:
    """Harm an object. `others` is the same object of another version."""
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how in ("another", "earlier"):
        shutil.copyfile(others, path)
    else:
        path.write_bytes(
            {"cut": whole[: len(whole) // 2], "longer": b"x" + whole, "flipped": whole[:-1] + bytes([whole[-1] ^ 1])}[how]
        )
