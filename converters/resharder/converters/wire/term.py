"""The term of a daemon, by which everyone who calls it tells a daemon from the one that has taken over from it.

A registry (the folder that a daemon keeps) has an id, and a number that rises whenever another daemon takes over. The daemon
names both in the initial metadata of each answer, and callers name the newest that they have seen in each call:

- an answer of a lower term of the same registry is not believed: it becomes an error, as if the daemon could not be reached;
- a daemon that is called with a higher term of its registry ends, or refuses the call if it does not trust the caller with that.

Terms of different registries say nothing about each other.
"""

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass

HEADER = "resharder-term"
"""Key of the metadata."""
_TERM = re.compile(r"([0-9a-f]{16})/([1-9][0-9]{0,17})")


@dataclass(frozen=True)
class Term:
    """Number of a take-over (from 1) of the registry with an id (16 hexadecimal digits)."""

    registry: str
    number: int

    def __str__(self) -> str:
        return f"{self.registry}/{self.number}"

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata that names this term."""
        return ((HEADER, str(self)),)

    def replaces(self, other: "Term") -> bool:
        """Return whether a daemon of this term has taken over from one of the other."""
        return self.registry == other.registry and self.number > other.number


def parse_term(text: str) -> Term | None:
    """Return the term in a text; None for another text."""
    found = _TERM.fullmatch(text)
    return Term(found[1], int(found[2])) if found else None


def term_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> Term | None:
    """Return the term that metadata names; None for none, as in answers of earlier releases."""
    for key, value in metadata or ():
        if key == HEADER and isinstance(value, str):
            return parse_term(value)
    return None


class NewestTerms:
    """Highest term of each registry that a process has seen. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, Term] = {}

    def see(self, term: Term) -> Term:
        """Note a term, and return the newest of its registry: a higher one if a daemon has taken over since."""
        with self._lock:
            newest = self._newest.get(term.registry, term)
            if newest.number <= term.number:
                newest = self._newest[term.registry] = term
            return newest

    def newest(self, registry: str) -> Term | None:
        """Return the newest term of a registry; None for one of which none was seen."""
        return self._newest.get(registry)


def replaced_message(term: Term, newest: Term) -> str:
    """Return why an answer of a daemon of a term is not believed."""
    return (
        f"a daemon of term {newest.number} has taken over from the one that answered, of term {term.number}: "
        "its answer is not believed"
    )
