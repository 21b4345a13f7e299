"""A store and an archive of an earlier release: `format_1` is a version as archived with protocol revision 1."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.converters.geometry.layout import full_box
from resharder.converters.storage.digest import digest
from resharder.server.archive.archive import Archive
from resharder.server.archive.archived import MARKER
from resharder.server.store import manifest
from resharder.server.store.manifest import MANIFEST_FILE, BadManifest
from resharder.server.store.store import Store

from tests.support.store_versions import numbers

OLD = Path(__file__).with_name("format_1")
FINGERPRINT = json.loads((OLD / MANIFEST_FILE).read_bytes())["fingerprint"]
WIDTHS = {"bf16": 2, "f32": 4, "i64": 8, "u8": 1, "scalar": 4}


@pytest.fixture
def folder(root: Path) -> Path:
    """The version in a store that nobody has opened yet."""
    found = root / "store" / "models" / "policy" / "versions" / "00000001"
    shutil.copytree(OLD, found, ignore=shutil.ignore_patterns(MARKER))
    return found


@pytest.fixture
def archive(root: Path) -> Iterator[Archive]:
    shutil.copytree(OLD, root / "archive" / "policy" / "00000001")
    store = Store(root / "store")
    archive = Archive(store, str(root / "archive"), pause=0.01)
    archive.start(restore=False)
    yield archive
    archive.close()
    store.close()


def assert_digested_anew(store: Store) -> None:
    assert store.catalogue.get("policy", 1).fingerprint == FINGERPRINT
    found, before = store.reader.manifest("policy", 1), json.loads((OLD / MANIFEST_FILE).read_bytes())["digests"]
    with store.reader.open("policy", 1) as files:
        assert {name: array.itemsize for name, array in files.arrays.items()} == WIDTHS
        for name, array in files.arrays.items():
            assert found.digests[name] == digest(array, full_box(array.shape), array.shape) != int(before[name], 16)
            del array


def test_a_stored_version_is_digested_anew_and_keeps_its_fingerprint(folder: Path, root: Path) -> None:
    store = Store(root / "store")
    assert numbers(store) == [1]
    assert_digested_anew(store)
    store.close()
    renewed = (folder / MANIFEST_FILE).stat()
    again = Store(root / "store")
    assert_digested_anew(again)
    assert (folder / MANIFEST_FILE).stat().st_ino == renewed.st_ino  # not written a second time
    again.close()


@pytest.mark.parametrize("at", [-1, -40, -300])
def test_a_stored_version_with_a_changed_byte_is_dropped_not_digested(folder: Path, root: Path, at: int) -> None:
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[at] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    store = Store(root / "store")
    assert numbers(store) == []
    assert not folder.exists()
    store.close()


def test_old_digests_are_never_read_as_new_ones(folder: Path) -> None:
    with pytest.raises(BadManifest, match="expected a manifest of format 2, found 1"):
        manifest.read(folder)


def test_an_archived_version_comes_back_digested_anew_and_is_the_archived_one(archive: Archive) -> None:
    record = archive.restore("policy", 1)
    assert (record.number, record.step, record.fingerprint) == (1, 7, FINGERPRINT)
    assert_digested_anew(archive.store)
    assert archive.archive_now("policy", 1).fingerprint == FINGERPRINT
