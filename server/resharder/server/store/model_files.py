"""The small files of a model, `config.json` and tokenizer, in `files/<epoch>.<n>/`. The last of these folders is valid.

An epoch may have several folders, because the job sends its files again after a restart of the daemon. A folder of a later epoch
than `epoch`, the newest that a claim in effect or a READY version has, is of a claim that has not taken effect: it is not valid.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from resharder.server.infra.filesystem import (
    is_gone,
    make_durable_folder,
    make_folder,
    matching,
    move,
    sync,
    touching,
    write_file,
)


def folders(model: Path, epoch: int | None = None) -> list[Path]:
    """Return all folders of small files up to an epoch, the valid one last. Raises MediumRefused."""
    found = sorted(matching(model / "files", "[0-9]*.[0-9]*"), key=_numbers)
    return [folder for folder in found if epoch is None or _numbers(folder)[0] <= epoch]


def write(model: Path, epoch: int, files: Mapping[str, bytes], valid: int | None = None) -> Path:
    """Write a new folder of an epoch durably, beside the one that is valid by `valid`, and return it.

    Raises MediumRefused; the folder that was valid still is.
    """
    parent = make_durable_folder(model / "files")
    drop_unfinished(model, valid)
    part = parent / "new.part"
    done = parent / f"{epoch}.{1 + max((_numbers(folder)[1] for folder in folders(model)), default=0)}"
    try:
        make_folder(part)
        for name, content in files.items():
            write_file(part / name, content)
        move(part, done)
        sync(parent)
    except OSError:
        drop(model, done, valid)
        raise
    return done


def drop(model: Path, done: Path, valid: int | None) -> None:
    """Remove a folder that is not to become valid after all. One that cannot be removed stays until the next call."""
    with suppress(OSError):
        if not is_gone(done):
            done.rename(model / "files" / "new.part")  # a folder that is removed in part must not be the valid one
        drop_unfinished(model, valid)


def drop_others(model: Path, done: Path) -> None:
    """Remove all folders but the valid one; the next call of `write` retries those that stay."""
    with suppress(OSError):
        for other in folders(model):
            if other != done:
                shutil.rmtree(other, ignore_errors=True)


def drop_unfinished(model: Path, valid: int | None) -> None:
    """Remove unfinished folders, and all others that are not valid. Raises MediumRefused.

    The names of all folders are durable before: after a power cut, a folder that is removed in part is not the valid one.
    """
    kept = folders(model, valid)[-1:]
    others, unfinished = [each for each in folders(model) if each not in kept], matching(model / "files", "*.part")
    if others or unfinished:
        sync(model / "files")
    for folder in others:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in unfinished:
        with touching(folder, "removing"):
            shutil.rmtree(folder)


def _numbers(folder: Path) -> tuple[int, int]:
    epoch, _, serial = folder.name.partition(".")
    return int(epoch), int(serial)
