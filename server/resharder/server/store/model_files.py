"""The small files of a model, config.json and tokenizer, in its folder of the store: `files/<epoch>.<n>/`, the last one counts.

A daemon that comes back gets the files of an epoch again, so epochs may have several.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from resharder.server.infra.filesystem import make_folder, sync, write_file


def folders(model: Path) -> list[Path]:
    """All of them, the one that counts last."""
    return sorted((model / "files").glob("[0-9]*.[0-9]*"), key=_numbers)


def write(model: Path, epoch: int, files: Mapping[str, bytes]) -> Path:
    """A new folder, on its medium, in place of all others."""
    parent = make_folder(model / "files")
    earlier = folders(model)
    part = make_folder(parent / "new.part")
    for name, content in files.items():
        write_file(part / name, content)
    done = parent / f"{epoch}.{_numbers(earlier[-1])[1] + 1 if earlier else 1}"
    part.rename(done)
    sync(parent)
    for older in earlier:
        shutil.rmtree(older)
    return done


def drop_unfinished(model: Path) -> None:
    for part in (model / "files").glob("*.part"):
        shutil.rmtree(part)


def _numbers(folder: Path) -> tuple[int, int]:
    epoch, _, serial = folder.name.partition(".")
    return int(epoch), int(serial)
