"""A virtual environment with the packages of some extras and nothing else, linked from this one without a network."""

import os
import re
import subprocess
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


class BareVenv:
    """Environment in `folder` with this checkout, its base requirements, and those of `extras`."""

    def __init__(self, folder: Path, *extras: str) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        packages = next(folder.glob("lib/python*/site-packages"))
        own = distribution("resharder")
        for found in _closure(own, set(extras)):
            for top in {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                link, target = packages / top, Path(str(found.locate_file(top)))
                if (target.is_dir() and link.is_dir()) or link.exists():
                    _merge(target, link)  # a namespace package of several distributions, such as `google`
                else:
                    link.symlink_to(target)
        (packages / "checkout.pth").write_text(
            "\n".join(str(ROOT / side) for side in ("proto", "server", "client", "converters"))
        )
        (packages / "resharder-0.1.0.dist-info").symlink_to(str(own._path))  # type: ignore[attr-defined]

    def run(self, *arguments: str, timeout: float = 300) -> "subprocess.CompletedProcess[str]":
        """Run Python with arguments, without variables of Resharder and Python."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RESHARDER", "PYTHON"))}
        command = [str(self.python), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)


def _closure(own: Distribution, extras: set[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    waiting: list[tuple[Distribution, set[str]]] = [(own, extras)]
    while waiting:
        of, wanted = waiting.pop()
        for line in of.requires or ():
            requirement = Requirement(line)
            environments = [{"extra": extra} for extra in (*wanted, "")]
            if requirement.marker is not None and not any(requirement.marker.evaluate(each) for each in environments):
                continue
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            if name == "resharder":
                waiting.append((own, set(requirement.extras)))
            elif name not in found:
                found[name] = distribution(name)
                waiting.append((found[name], set(requirement.extras)))
    return list(found.values())


def _merge(target: Path, link: Path) -> None:
    if link.is_symlink():
        old = Path(os.readlink(link))
        link.unlink()
        link.mkdir()
        _merge(old, link)
    for each in target.iterdir():
        if each.name == "__pycache__" or (link / each.name).exists():
            continue
        (link / each.name).symlink_to(each)
