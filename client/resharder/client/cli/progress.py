"""Progress on standard error, on a terminal alone."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from resharder.client.cli.output import size
from resharder.client.cli.terminal import error_console, rewrite, shown
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_PATIENCE = 1.0  # seconds after which a wait is announced


def count_up(what: str, done: int, total: int) -> None:
    """Rewrite a line of progress on standard error; end it when `done` reaches `total`."""
    rewrite(f"{what}: {done} of {total}", end="\n" if done == total else "")


@contextmanager
def waiting(what: str, silent: bool = False) -> Iterator[Callable[[], None]]:
    """Name what the block waits for, on standard error, if it takes longer than a second; on a terminal alone.

    Yields a function that ends the wait before the block does.
    """
    if silent or not sys.stderr.isatty():
        yield lambda: None
        return
    said = threading.Event()

    def say() -> None:
        said.set()
        rewrite(f"{what} …")

    timer = threading.Timer(_PATIENCE, say)
    timer.daemon = True
    timer.start()

    def end() -> None:
        timer.cancel()
        timer.join()
        if said.is_set():
            said.clear()
            rewrite(" " * len(shown(f"{what} …", sys.stderr)), end="\r")

    try:
        yield end
    finally:
        end()


class Bar:
    """Progress bar on standard error from the first bytes on; none for JSON, and none without a terminal."""

    def __init__(self, silent: bool, title: str, total: int | None) -> None:
        columns = (BarColumn(), _BarSizes(), TimeRemainingColumn())
        silent = silent or not sys.stderr.isatty()
        title_column = TextColumn("{task.description}", markup=False)
        self._progress = Progress(title_column, *columns, console=error_console(), disable=silent)
        self._title, self._total = shown(title, sys.stderr), total
        self._started = False

    def update(self, done: int, total: int) -> None:
        """Show `done` of `total` bytes."""
        if not self._started:
            self._started = True
            self._task = self._progress.add_task(self._title, total=self._total)
            self._progress.start()
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        if self._started:
            self._progress.stop()


class _BarSizes(ProgressColumn):
    """Bytes so far, of all, and per second."""

    def render(self, task: Task) -> Text:
        """Return the text of a task."""
        rate = f", {size(int(task.speed))}/s" if task.speed else ""
        return Text(f"{size(int(task.completed))} of {size(int(task.total or 0))}{rate}")
