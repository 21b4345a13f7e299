"""The term of this daemon, durable in the store's folder, and the end of the process once another daemon has taken over.

    <root>/term.json    id of the registry and the newest term; a daemon that takes over raises it before it touches anything else

A daemon that learns of a higher term ends at once: it writes nothing more, and waits for nothing, for what it has is the other
daemon's by now. It learns of it from this file, or from a call of a node or an operator whom the other daemon has answered. The
calls of others who know of a higher term are refused, and go to the other daemon: with security, none of them ends this one.
"""

import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import structlog
from resharder.converters.json_input import parse_json
from resharder.converters.wire.term import Term, parse_term, term_of
from resharder.server.infra.filesystem import make_folder, touching, write_file
from resharder.server.state.errors import Unavailable

REPLACED_STATUS = 3
"""Exit status of a daemon from which another one has taken over."""
TERM_FILE = "term.json"
_LOOK_SECONDS = 0.2
_log = structlog.get_logger("resharder.standby")


def read_term(root: Path) -> Term | None:
    """Return the term in a store's folder; None for a folder without one. Unreadable content is logged, and counts as none.

    Raises MediumRefused.
    """
    file = root / TERM_FILE
    with touching(file, "reading"):
        content = file.read_bytes() if file.exists() else None
    if content is None:
        return None
    try:
        if (term := parse_term("{registry}/{term}".format(**parse_json(content)))) is None:
            raise ValueError("expected the id of a registry and a term")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        _log.error("term_unreadable", file=str(file), error=str(error))
        return None
    return term


def write_term(root: Path, term: Term) -> None:
    """Make a term that of a store's folder, durably. Raises MediumRefused."""
    write_file(make_folder(root) / TERM_FILE, json.dumps({"registry": term.registry, "term": term.number}).encode() + b"\n")


def begin_term(root: Path, at_least: int = 1) -> Term:
    """Return the term of a store's folder, which is new or is raised if it is below `at_least`. Raises MediumRefused."""
    found = read_term(root)
    term = found or Term(secrets.token_hex(8), 1)
    if term.number < at_least:
        term = Term(term.registry, at_least)
    if term != found:
        write_term(root, term)
    return term


def raise_term(root: Path) -> Term:
    """Begin a term above every one of a store's folder. Raises MediumRefused."""
    found = read_term(root)
    return begin_term(root, found.number + 1 if found else 1)


def end_process(reason: str) -> None:
    """End this process at once. Nothing is written, and no thread is waited for."""
    _log.error("daemon_replaced", reason=reason)
    with suppress(OSError):
        print(f"resharderd: {reason}", file=sys.stderr, flush=True)
    os._exit(REPLACED_STATUS)


class Tenure:
    """The time for which this process is the daemon of its registry.

    Args:
        root: The store's folder; None watches no file.
        term: The daemon's term.
        end: Function that ends the process, called with the reason.
    """

    def __init__(self, root: Path | None, term: Term, end: Callable[[str], object] = end_process) -> None:
        self._root, self.term, self._end = root, term, end
        self.metadata = term.metadata()
        """Metadata of every answer."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="term", daemon=True)

    def start(self) -> None:
        """Begin to watch the folder's term."""
        if self._root is not None:
            self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._closed.set()

    def check(self, metadata: Iterable[tuple[str, str | bytes]], *, believed: bool) -> None:
        """Refuse a call whose metadata names a higher term of this registry, and end the process if the caller is believed.

        Raises Unavailable (DAEMON_REPLACED).
        """
        if (seen := term_of(metadata)) is None or not seen.replaces(self.term):
            return
        if believed:
            self._end(self._replaced(seen))
        raise Unavailable(
            "DAEMON_REPLACED",
            f"the call names term {seen.number} of this registry, the daemon's is {self.term.number}: call the daemon that has "
            "taken over. If there is none, restart the caller",
        )

    def look(self) -> None:
        """End the process if the folder has a higher term."""
        with suppress(OSError):  # a medium that fails says nothing
            if self._root is not None and (found := read_term(self._root)) is not None and found.replaces(self.term):
                self._end(self._replaced(found))

    def _replaced(self, newest: Term) -> str:
        return (
            f"another daemon has taken over: its term is {newest.number}, this one's is {self.term.number}. This one ends; "
            "start it again only as a standby"
        )

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            self.look()
