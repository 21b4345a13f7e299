"""The rename that makes versions READY: of one version, or of several that become READY together, all or none.

    decision.json, durable -> rename and sync each version -> remove decision.json, durable

A daemon that starts with a decision completes it. If a file operation fails, the renames are undone before the decision is
removed, so that a daemon that is killed in between completes it instead. If that fails too, not all versions are complete at the
next start, and the renamed ones are dropped.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import structlog
from blake3 import blake3
from resharder.converters.failpoints import failpoint
from resharder.converters.json_input import parse_json
from resharder.server.infra.filesystem import make_durable_folder, move, sync, touching, write_file
from resharder.server.store import manifest
from resharder.server.store.folder import ATTEMPTS, sync_or_undo

DECISION = "decision.json"
Rename = tuple[Path, Path]
"""Source and target, folders of one version."""
_log = structlog.get_logger("resharder.store")


def rename_together(root: Path, renames: Sequence[Rename]) -> None:
    """Rename the folders of versions in the store at `root`, durably, all or none. Callers hold the catalogue's lock.

    Raises OSError after the renames are undone.
    """
    if len(renames) == 1:
        _rename(*renames[0])
        return
    complete_decision(root)  # one whose undo failed
    decision, done = root / DECISION, list[Rename]()
    named = [[str(path.relative_to(root)) for path in each] for each in renames]
    failpoint("decision.write")
    write_file(decision, json.dumps({"renames": named, "blake3": _hash(named)}).encode())
    try:
        for source, target in renames:
            _rename(source, target)
            done.append((source, target))
        _remove(decision)
    except OSError as error:
        _log.error("versions_not_ready", versions=[str(target) for _, target in renames], error=str(error))
        for source, target in reversed(done):
            move(target, source)
            sync(target.parent)
        _remove(decision)
        raise


def _rename(source: Path, target: Path) -> None:
    make_durable_folder(target.parent)
    failpoint("commit.before-rename")
    move(source, target)
    failpoint("commit.after-rename")
    try:
        sync_or_undo(source, target)
    except OSError:
        _remove_manifest(source)
        raise
    failpoint("commit.after-sync")


def _remove_manifest(folder: Path) -> None:
    """Remove the manifest of a version that was renamed back, durably.

    A power failure may keep the rename without the way back, and the version would be READY although it was reported as ABORTED.
    """
    for _ in range(ATTEMPTS):
        try:
            with touching(folder, "removing the manifest of"):
                (folder / manifest.MANIFEST_FILE).unlink(missing_ok=True)
            sync(folder)
            return
        except OSError as error:
            refused = error
    _log.error("manifest_not_removed", folder=str(folder), error=str(refused))


def _remove(decision: Path) -> None:
    failpoint("decision.remove")
    with touching(decision, "removing"):
        decision.unlink(missing_ok=True)
    sync(decision.parent)


def _parse(root: Path, content: bytes) -> list[Rename]:
    """Return the renames of a decision. Raises ValueError, KeyError or TypeError for other content."""
    found = parse_json(content)
    if found["blake3"] != _hash(found["renames"]):
        raise ValueError("expected the hash of its other content")
    return [(root / source, root / target) for source, target in found["renames"]]


def _hash(named: object) -> str:
    return blake3(json.dumps(named).encode()).hexdigest()


def complete_decision(root: Path) -> None:
    """Complete a decision that a kill or a failing medium left behind, or drop what it renamed. Raises OSError."""
    decision = root / DECISION
    if not decision.exists():
        return
    try:
        renames = _parse(root, decision.read_bytes())
    except (ValueError, KeyError, TypeError) as error:
        _log.error("decision_unreadable", error=repr(error))
        renames = []
    whole = all(_is_complete(source) or _is_complete(target) for source, target in renames)
    for source, target in renames:
        failpoint("decision.complete")
        if whole and not target.exists():
            make_durable_folder(target.parent)
            move(source, target)
            sync(target.parent)
        elif not whole and target.exists():
            shutil.rmtree(target)
    _remove(decision)


def _is_complete(folder: Path) -> bool:
    try:
        manifest.read(folder)
    except ValueError:
        return False
    return True
