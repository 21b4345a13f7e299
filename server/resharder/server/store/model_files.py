"""The small files of a model, config.json and tokenizer, in its folder of the store: `files/<epoch>.<n>/`, the last one counts.

A daemon that comes back gets the files of an epoch again, so epochs may have several.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from resharder.server.infra.filesystem import make_folder, move, sync, touching, write_file


def folders(model: Path) -> list[Path]:
    """All of them, the one that counts last."""
    return sorted((model / "files").glob("[0-9]*.[0-9]*"), key=_numbers)


def write(model: Path, epoch: int, files: Mapping[str, bytes]) -> Path:
    """A new folder, on its medium, in place of all others. Raises MediumRefused: the folder that counted does so still."""
    parent = make_folder(model / "files")
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
        for unfinished in (done, part):
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    for older in earlier:  # one that stays is older still: the next call tries again
        shutil.rmtree(older, ignore_errors=True)
    return done


def drop_unfinished(model: Path) -> None:
    """And what an earlier daemon has not removed."""
    for older in folders(model)[:-1]:
        shutil.rmtree(older, ignore_errors=True)
    for part in (model / "files").glob("*.part"):
        with touching(part, "removing"):
            shutil.rmtree(part)


def _numbers(folder: Path) -> tuple[int, int]:
    epoch, _, serial = folder.name.partition(".")
    return int(epoch), int(serial)
