"""Restore of a store's models from its folder when the daemon starts."""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import structlog
from resharder.converters.failpoints import failpoint
from resharder.server.infra.filesystem import make_durable_folder, matching, sync
from resharder.server.state.version import MODEL_NAME, READY, RETIRED
from resharder.server.store import manifest, model_files
from resharder.server.store.catalogue import StoredModel, parse_claim
from resharder.server.store.history import read_history
from resharder.server.store.manifest import redigest
from resharder.server.store.partial import VerifiedVersion, read_missing, remove_leftovers
from resharder.server.store.renames import complete_decision

_log = structlog.get_logger("resharder.store")


def restore_models(root: Path, *, hold: bool = True) -> dict[str, StoredModel]:
    """Read all models of the store at `root`, with the RETIRED and ABORTED versions of its history.

    `hold`: see `Store`. Removes unfinished versions and damaged ones. Raises OSError for a file that cannot be read, whose
    version may be undamaged.
    """
    failpoint("start.read")
    complete_decision(root)
    folders = sorted(make_durable_folder(root / "models").iterdir())
    sync(root / "models")
    models = {folder.name: _restore_model(folder, hold) for folder in folders if MODEL_NAME.fullmatch(folder.name)}
    for record in read_history(root):
        model = models.get(record.model)
        if model is not None:  # claim.json may be damaged
            model.number, model.epoch = max(model.number, record.number), max(model.epoch, record.epoch)
        if model is not None and (record.number not in model.records or model.records[record.number].state != READY):
            if record.state == READY:
                record = replace(record, state=RETIRED, reason="gone when the daemon started")
            model.put(record)
    for model in models.values():
        model.forget_old()
    return models


def _remove_leftovers(folder: Path, found: manifest.Manifest) -> None:
    try:
        remove_leftovers(folder, found.other_files)
    except OSError as error:  # nothing reads them
        _log.warning("not_removed", folder=str(folder), error=str(error))


def _shared(folder: Path, found: manifest.Manifest) -> dict[int, int]:
    """Return the inodes and bytes of the files that a version shares with others."""
    stats = ((folder / file.path).stat() for file in found.files)
    return {each.st_ino: each.st_size for each in stats if each.st_nlink > 1}


def _read_claim(model: StoredModel) -> None:
    """Read the numbers assigned and the newest job. Damaged content is logged, and that of the versions and history counts."""
    with suppress(FileNotFoundError):
        content = (model.folder / "claim.json").read_bytes()
        try:
            number, epoch, jobs, claim = parse_claim(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _log.error("claim_unreadable", model=model.name, error=repr(error))
            return
        model.number, model.epoch, model.jobs, model.claim = number, epoch, jobs, claim


def _restore_model(folder: Path, hold: bool) -> StoredModel:
    model = StoredModel(folder.name, folder, hold)
    for renamed in (folder, folder / "versions"):  # a daemon that was killed may not have synced what is read or removed here
        if renamed.exists():
            sync(renamed)
    model.sweep()
    model.stuck = model.unswept()
    _read_claim(model)
    for version in matching(folder / "versions", "[0-9]*"):
        try:
            redigest(version)
            found = manifest.read(version)
            record = found.record
            if record.model != model.name or record.number != int(version.name):
                raise manifest.BadManifest(f"{version.name}: its manifest is that of {record.name}")
            if found.whole:
                _remove_leftovers(version, found)
            else:
                model.put_verified(record.number, VerifiedVersion(version, found, read_missing(version, found.files)))
            model.put(record)
            if shared := _shared(version, found):
                model.shared[record.number] = shared
        except ValueError as error:
            _log.error("version_dropped", model=model.name, folder=version.name, error=str(error))
            shutil.rmtree(version)
    model.number = max([model.number, *model.records])
    model.epoch = max([model.epoch, *(r.epoch for r in model.records.values())])
    model_files.drop_unfinished(folder, model.files_epoch)
    model.published = bool(model_files.folders(folder))
    _log.info("model_recovered", model=model.name, ready=sorted(model.records), epoch=model.epoch)
    return model
