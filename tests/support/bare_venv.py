"""Virtual environments with the packages of some extras and nothing else.

A `BareVenv` has this checkout, an `InstalledVenv` a wheel that pip has installed. Both have links to packages of this
environment, and need no network.
"""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


class BareVenv:
    """Environment in `folder` with this checkout, its base requirements, and those of `extras`."""

    def __init__(self, folder: Path, *extras: str) -> None:
        self._create(folder)
        own = distribution("resharder")
        self._link(_closure(own, set(extras)))
        (self.packages / "checkout.pth").write_text(
            "\n".join(str(ROOT / side) for side in ("proto", "server", "client", "converters"))
        )
        (self.packages / own._path.name).symlink_to(str(own._path))  # type: ignore[attr-defined]

    def _create(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.folder, self.python = folder, folder / "bin" / "python"
        self.packages = next(folder.glob("lib/python*/site-packages"))

    def _link(self, distributions: Iterable[Distribution]) -> None:
        for found in distributions:
            for top in {Path(str(file)).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
                link, target = self.packages / top, Path(str(found.locate_file(top)))
                if (target.is_dir() and link.is_dir()) or link.exists():
                    _merge(target, link)  # a namespace package of several distributions, such as `google`
                elif target.exists():
                    link.symlink_to(target)

    def run(self, *arguments: object, timeout: float = 300, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run Python with arguments, without variables of Resharder and Python other than `variables`."""
        return self._run(self.python, *arguments, timeout=timeout, **variables)

    def _run(self, *command: object, timeout: float, **variables: str) -> "subprocess.CompletedProcess[str]":
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RESHARDER", "PYTHON"))}
        return subprocess.run(
            [*map(str, command)], env=environment | variables, capture_output=True, text=True, timeout=timeout, check=False
        )


class InstalledVenv(BareVenv):
    """Environment in `folder` where pip has installed a wheel of this project with `extra`, and no other package.

    What the extra requires, and the packages of the `host` with all that these require, are linked. pip has no index: the
    installation fails if the wheel requires another package, or another release of one.
    """

    def __init__(self, folder: Path, wheel: Path, extra: str, host: str = "") -> None:
        self._create(folder)
        found = _closure(distribution("resharder"), {extra})
        if host:
            found += [distribution(host), *_closure(distribution(host), set())]
        self._link({each.name: each for each in found}.values())
        install = ("install", "-q", "--disable-pip-version-check", "--no-index", "--no-compile", f"{wheel}[{extra}]")
        done = self._run(sys.executable, "-m", "pip", "--python", self.python, *install, timeout=900)
        assert done.returncode == 0, done.stderr

    def program(self, name: str, *arguments: object, **variables: str) -> str:
        """Run an installed program, and return what it prints."""
        done = self._run(self.folder / "bin" / name, *arguments, timeout=1800, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def _closure(own: Distribution, extras: set[str]) -> list[Distribution]:
    found: dict[str, Distribution] = {}
    wanted_of: dict[str, set[str]] = {}  # one may require a package, and another an extra of it
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
            elif name not in found or requirement.extras - wanted_of[name]:
                with suppress(PackageNotFoundError):  # the Makefile removes some of vLLM's
                    found[name] = distribution(name)
                    wanted_of[name] = wanted_of.get(name, set()) | requirement.extras
                    waiting.append((found[name], wanted_of[name]))
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
