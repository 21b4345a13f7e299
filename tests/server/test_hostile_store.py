"""Manifests and claims with the right hash of other content: the version is dropped, and the daemon starts and publishes."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.storage.files import lay_out, read_layout
from resharder.server.state.version import LAST_NUMBER
from resharder.server.store import manifest
from resharder.server.store.store import Store

from tests.support.store_versions import claim, numbers, publish

Spoil = Callable[[dict[str, Any], Path], None]


def _entry(folder: Path, name: str) -> dict[str, Any]:
    return {"size": (folder / name).stat().st_size, "blake3": blake3(b"").hexdigest()}


def a_folder(content: dict[str, Any], folder: Path) -> None:
    (folder / "inner").mkdir()
    content["files"]["inner"] = _entry(folder, "inner")


def below_a_file(content: dict[str, Any], folder: Path) -> None:
    content["files"]["config.json/x"] = {"size": 2, "blake3": blake3(b"{}").hexdigest()}


def of_another_version(content: dict[str, Any], folder: Path) -> None:
    content["files"]["../00000001/config.json"] = content["files"]["config.json"]


def a_link_to_itself(content: dict[str, Any], folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    content["files"]["loop"] = {"size": 0, "blake3": blake3(b"").hexdigest()}


def a_tensor_twice(content: dict[str, Any], folder: Path) -> None:
    layout = lay_out([TensorSpec("b", "F32", (16,))])[0]
    (folder / "z.safetensors").write_bytes(layout.header + bytes(64))
    content["files"]["z.safetensors"] = {"size": layout.size, "blake3": blake3(layout.header).hexdigest()}


def numbers_without_a_successor(content: dict[str, Any], folder: Path) -> None:
    content["version"]["epoch"] = (1 << 63) - 1


@pytest.mark.parametrize(
    "spoil", [a_folder, below_a_file, of_another_version, a_link_to_itself, a_tensor_twice, numbers_without_a_successor]
)
def test_a_version_whose_manifest_names_other_content_is_dropped_and_the_store_publishes(tmp_path: Path, spoil: Spoil) -> None:
    store = Store(tmp_path / "store")
    epoch = claim(store)
    publish(store, epoch, 0)
    folder = store.folder.path(publish(store, epoch, 1))
    store.close()
    content = json.loads((folder / manifest.MANIFEST_FILE).read_bytes())
    spoil(content, folder)
    (folder / manifest.MANIFEST_FILE).write_bytes(manifest._encoded(content))
    again = Store(tmp_path / "store")
    assert numbers(again) == [1]
    publish(again, claim(again, "next"), 2)
    assert len(numbers(again)) == 2
    again.close()


@pytest.mark.parametrize(
    "content", ["{}", "[", '{"renames": [["models/policy/staging/9", "models/policy/versions/00000001"]], "blake3": "0"}']
)
def test_a_damaged_decision_removes_no_version(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    publish(store, claim(store), 0)
    store.close()
    (tmp_path / "decision.json").write_text(content)
    store = Store(tmp_path)
    assert numbers(store) == [1]
    assert not (tmp_path / "decision.json").exists()
    publish(store, claim(store), 1)
    store.close()


@pytest.mark.parametrize("highest", [LAST_NUMBER + 1, (1 << 63) - 1])
@pytest.mark.parametrize("field", ["version", "epoch", "jobs", "claim"])
def test_numbers_of_a_claim_that_have_no_successor_do_not_count(tmp_path: Path, field: str, highest: int) -> None:
    store = Store(tmp_path / "store")
    publish(store, claim(store), 0)
    store.close()
    file = tmp_path / "store/models/policy/claim.json"
    content = json.loads(file.read_bytes())
    if field in ("version", "epoch"):
        content[field] = highest
    else:
        content[field]["job" if field == "jobs" else "epoch"] = highest
    file.write_text(json.dumps(content))
    again = Store(tmp_path / "store")
    record = publish(again, claim(again, "next"), 1)
    assert (record.number, record.epoch < LAST_NUMBER) == (2, True)
    again.close()


@pytest.mark.parametrize("reason", [errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_listed_is_not_an_empty_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(reason, os.strerror(reason))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refused)
    with pytest.raises(OSError, match=os.strerror(reason)):
        read_layout(tmp_path)
