"""The small files of a model, `config.json` and tokenizer, in `files/<epoch>.<n>/`. The last of these folders is valid.

An epoch may have several folders, because the job sends its files again after a restart of the daemon.
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


def folders(model: Path) -> list[Path]:
    """Return all folders of small files, the valid one last. Raises MediumRefused."""
    return sorted(matching(model / "files", "[0-9]*.[0-9]*"), key=_numbers)


def write(model: Path, epoch: int, files: Mapping[str, bytes]) -> Path:
    """Write a new folder durably, in place of all others, and return it.

    Raises MediumRefused; the folder that was valid still is.
    """
    parent = make_durable_folder(model / "files")
    earlier = folders(model)
    drop_unfinished(model)
    part = parent / "new.part"
    done = parent / f"{epoch}.{_numbers(earlier[-1])[1] + 1 if earlier else 1}"
    try:
        make_folder(part)
        for name, content in files.items():
            write_file(part / name, content)
        move(part, done)
        sync(parent)
    except OSError:
        with suppress(OSError):
            if not is_gone(done):
                done.rename(part)  # a folder that is removed in part must not be the valid one
            drop_unfinished(model)
        raise
    for older in earlier:  # the next call retries one that stays
        shutil.rmtree(older, ignore_errors=True)
    return done


def drop_unfinished(model: Path) -> None:
    """Remove unfinished folders, and older ones that an earlier daemon left behind. Raises MediumRefused.

    The names of all folders are durable before: after a power cut, a folder that is removed in part is not the valid one.
    """
    older, unfinished = folders(model)[:-1], matching(model / "files", "*.part")
    if older or unfinished:
        sync(model / "files")
    for folder in older:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in unfinished:
        with touching(folder, "removing"):
            shutil.rmtree(folder)


def _numbers(folder: Path) -> tuple[int, int]:
    epoch, _, serial = folder.name.partition(".")
    return int(epoch), int(serial)
