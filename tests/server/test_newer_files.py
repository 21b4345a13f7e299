"""A store that a later release has written to, before a daemon of this one: what it does not know of is no damage."""

import json
from pathlib import Path

from resharder.server.fleets.persistence import FleetFiles
from resharder.server.state.fleet import Fleet
from resharder.server.state.version import ABORTED
from resharder.server.store import manifest
from resharder.server.store.history import _checksum
from resharder.server.store.store import Store

from tests.support.store_versions import claim, numbers, publish


def test_versions_with_fields_that_this_release_does_not_know_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    epoch = claim(store)
    publish(store, epoch, 0)
    kept = publish(store, epoch, 1)
    store.lifecycle.abort("policy", store.lifecycle.begin("policy", epoch, 2, "job").number, "given up")
    file, history = store.folder.path(kept) / manifest.MANIFEST_FILE, store.folder.root / "history.jsonl"
    store.close()
    content = json.loads(file.read_bytes())
    content["version"]["mood"], content["weather"] = "cheerful", {"is": "fine"}
    file.write_bytes(manifest._encoded(content))
    lines = [json.loads(line) | {"mood": "grim"} for line in history.read_text().splitlines()]
    for line in lines:
        line["crc32"] = _checksum({name: value for name, value in line.items() if name != "crc32"})
    history.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = Store(tmp_path / "store")
    assert numbers(again) == [1, 2]
    assert numbers(again, ABORTED) == [3]
    assert again.folder.path(kept).is_dir()
    again.close()


def test_a_manifest_of_another_format_is_no_version(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    folder = store.folder.path(publish(store, claim(store), 0))
    store.close()
    file = folder / manifest.MANIFEST_FILE
    content = json.loads(file.read_bytes()) | {"format": manifest.FORMAT + 1}
    file.write_bytes(manifest._encoded(content))
    again = Store(tmp_path / "store")
    assert numbers(again) == []
    again.close()


def test_fleets_with_fields_that_this_release_does_not_know_are_kept(tmp_path: Path) -> None:
    files = FleetFiles(tmp_path)
    files.save(fleet := Fleet("policy", "policy", settled=3), 0.0)
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mood": "grim"}))
    assert files.load(0.0) == {"policy": fleet}
