"""Output of the command on the terminal: texts of other parties are escaped, and glyphs that the terminal lacks replaced.

Texts are escaped before they are laid out, so that columns are measured with what is shown.
"""

import os
import select
import sys
import threading
from typing import Any

from resharder.converters.printable import CLOSED, GLYPHS, printable, unescaped
from rich.console import Console
from rich.style import Style
from rich.text import Text


def shown(text: str, stream: Any = None) -> str:
    """Return `text` as `stream` shows it, by default standard output: on one line, without characters that act."""
    encoding = getattr(stream or sys.stdout, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, GLYPHS).decode(encoding)


def styled(text: str, style: str | Style = "") -> Text:
    """Return `text` as it is shown, in a style."""
    return Text(shown(text), style=style)


def say(line: str = "") -> None:
    """Print a line on standard output, at once."""
    print(shown(line), flush=True)


def tell(line: str) -> None:
    """Print a line on standard error, at once."""
    print(shown(line, sys.stderr), file=sys.stderr, flush=True)


def rewrite(line: str, end: str = "") -> None:
    """Print a line over the present one on standard error, and leave the cursor at its end."""
    stream = unescaped(sys.stderr)
    stream.write(f"\r{shown(line, stream)}{end}")
    stream.flush()


def end_with_reader() -> None:
    """End this process once the reader of standard output has gone; a command that waits for a change would not notice."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # not a file
        return

    def wait() -> None:
        closing = select.poll()
        closing.register(output, 0)  # nothing but errors: POLLERR of a pipe without a reader
        closing.poll()
        os._exit(CLOSED)

    threading.Thread(target=wait, name="reader", daemon=True).start()


def console(wide: bool = False) -> Console:
    """Return a console on standard output. Rows of piped and of wide output are not folded to fit a terminal."""
    width = 1000 if wide or not sys.stdout.isatty() else None
    return _Console(file=unescaped(sys.stdout), width=width, markup=False, highlight=False, soft_wrap=wide)


def error_console() -> Console:
    """Return a console on standard error."""
    return _Console(file=unescaped(sys.stderr), markup=False, highlight=False)


class _Console(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        """Return a string as it is shown, also where it is a part of another renderable."""
        return super().render_str(shown(text, self.file), **options)
