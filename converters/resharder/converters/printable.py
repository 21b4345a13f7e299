"""Text that others wrote, on a terminal or in a log, where it must not act; and standard streams that may be closed."""

import codecs
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

CLOSED = 141
"""Exit code of a command whose output is a pipe that its reader has closed, as for one that SIGPIPE ends."""
GLYPHS = "resharder.glyphs"
"""Error handler of codecs: a plain character for a glyph of ours that an encoding lacks, and an escape for any other."""

_PLAIN = str.maketrans({"–": "-", "→": ">", "…": "~", "×": "x", "·": ".", "█": "#"})


def printable(text: str) -> str:
    """Return `text` with what is not printable escaped as `repr` does: controls, line breaks, marks of direction, surrogates."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _glyphs(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return text.translate(_PLAIN).encode("ascii", "backslashreplace").decode(), error.end


codecs.register_error(GLYPHS, _glyphs)


class OutputClosed(OSError):
    """The output cannot be written. `__cause__` is the error."""


class OutputStream:
    """A text stream that raises OutputClosed where it cannot be written."""

    buffer = None  # not to be written past `write`

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise OutputClosed from error

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of `lines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise OutputClosed from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class PrintableStream(OutputStream):
    """A stream in which nothing but line breaks acts. `unescaped` is the one below, for colours and progress."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.unescaped = OutputStream(stream)

    def write(self, text: str) -> int:
        """Write `text`, escaped."""
        return super().write("\n".join(map(printable, text.split("\n"))))


def unescaped(stream: TextIO) -> TextIO:
    """Return the stream below a PrintableStream; any other as it is."""
    return cast(TextIO, getattr(stream, "unescaped", stream))


@contextmanager
def printable_output(command: str) -> Iterator[None]:
    """Run a command on standard streams that escape what others wrote and that write what their encoding has.

    Streams that are closed become the null device. Exits CLOSED without a word if the reader of the output has gone, 2 with a
    line if the output cannot be written for another reason, and 1 with a traceback for any other exception.
    """
    _open_closed_streams()
    streams = sys.stdout, sys.stderr
    for stream in streams:
        with suppress(AttributeError, ValueError):  # not a file, or detached from it
            cast(Any, stream).reconfigure(errors=GLYPHS)
    sys.stdout, sys.stderr = (cast(TextIO, PrintableStream(stream)) for stream in streams)
    try:
        with _reported():
            yield
        sys.stdout.flush()
    except OutputClosed as closed:
        _discard(streams)
        if isinstance(closed.__cause__, BrokenPipeError):
            sys.exit(CLOSED)
        print(f"{command}: cannot write the output: {closed.__cause__}", file=sys.stderr)
        sys.exit(2)
    finally:
        sys.stdout, sys.stderr = streams


@contextmanager
def _reported() -> Iterator[None]:
    """Print what Python prints at the end of a process: a text in place of an exit code, a traceback."""
    try:
        yield
    except OutputClosed:
        raise
    except SystemExit as end:
        sys.stdout.flush()
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            sys.exit(1)
        raise
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.exit(1)


def _open_closed_streams() -> None:
    """Open standard streams that the process began without, so that no other file becomes one of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _discard(streams: Iterable[TextIO]) -> None:
    """Send to the null device what is left in streams that cannot be written: Python flushes them at the end."""
    for stream in streams:
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
            stream.flush()
