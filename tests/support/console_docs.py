"""Pages that show commands with their output, as something that a test can run.

A ```console block is a session: a line `$ command` is typed (a `\\` at its end goes on in the next line, `&` at its end leaves
it running), what follows up to the next `$` is its whole output, standard error included. All blocks of a page are one session.
In an output `…` stands for anything within a line, a line of `…` alone for any lines, or none. How many spaces there are between
two words is not compared: the columns of a table are as wide as what varies in them. `<!-- install -->` before a block leaves it
out, except where a page is typed in an environment that has nothing installed.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_BLOCK = re.compile(r"^(?P<install><!-- install -->\n)?```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Step:
    """`line`: where the command stands on the page, from 1."""

    command: str
    output: str
    line: int

    @property
    def stays(self) -> bool:
        """It is left running."""
        return self.command.endswith("&")


def steps(page: str, *, install: bool = False) -> list[Step]:
    """Return the commands of a page; those that install with `install`. Raises ValueError for a block without a command first."""
    found: list[Step] = []
    for block in _BLOCK.finditer(page):
        if install or not block["install"]:
            found += _steps(block["body"], 1 + page.count("\n", 0, block.start("body")))
    return found


def _steps(body: str, first: int) -> Iterator[Step]:
    lines = body.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("$ ") and not (at and lines[at - 1].endswith("\\"))]
    if starts[:1] != [0]:
        raise ValueError(f"line {first}: expected a console block to begin with `$ command`, got {lines[:1]}")
    for at, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        text = at + 1
        while lines[text - 1].endswith("\\"):
            text += 1
        command = "\n".join(lines[at:text]).removeprefix("$ ")
        yield Step(command, "\n".join(lines[text:end]).rstrip("\n"), first + at)


def difference(expected: str, got: str) -> str:
    """Empty where `got` is what the page says; else the first line that is not to be found, and what came in its place."""
    wanted, came = _plain(expected), "".join(f"{line}\n" for line in _plain(got))
    if _pattern(wanted).fullmatch(came):
        return ""
    for end in range(1, len(wanted) + 1):
        if not _pattern([*wanted[:end], "…"]).fullmatch(came):
            return f"expected the line {wanted[end - 1]!r}, got:\n{got}"
    return f"expected no line after {wanted[-1] if wanted else 'nothing'!r}, got:\n{got}"


def _plain(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip("\n").splitlines()]


def _pattern(lines: list[str]) -> re.Pattern[str]:
    """Every line with its end, so that a line of `…` may stand for none."""
    parts = [r"(?:[^\n]*\n)*" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n" for line in lines]
    return re.compile("".join(parts))
