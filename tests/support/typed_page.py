"""A page of the documentation, typed into a shell: its files are saved, its commands run, their outputs compared.

The page names a file: "Save this as `train.py`", followed by a ```python or ```yaml block.
"""

import re
from pathlib import Path

from tests.support.console_docs import difference, steps
from tests.support.shell_session import Session, SessionEnded

_FILE = re.compile(r"^Save this as `(?P<name>[^`]+)`.*?^```(?:python|yaml)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def save_files(page: str, folder: Path) -> list[Path]:
    """Write the files that a page shows into a folder."""
    written = []
    for file in _FILE.finditer(page):
        written.append(folder / file["name"])
        written[-1].write_text(file["text"])
    return written


def type_page(session: Session, page: str, name: str, *, install: bool = False) -> list[str]:
    """Type the commands of a page, and return what differs from it, each with its line. Stops where the session ends."""
    found = []
    for step in steps(page, install=install):
        try:
            wrong = difference(step.output, session.run(step))
        except SessionEnded as error:
            return [*found, f"{name}, {error}"]
        if wrong:
            found.append(f"{name}, line {step.line}: {step.command}\n{wrong}")
    return found
