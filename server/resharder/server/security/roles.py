"""The configuration's table of names and roles.

    roles:
      dns:trainer.rl.example:      [publisher:policy]        # a model
      dns:*.serve.example:         [server:policy]           # a fleet
      dns:*.hosts.example:         [node:policy]             # a fleet, whose versions it may hold
      token:alice:                 [operator]
      token:bob:                   [operator:canaries]       # of one fleet
      token:prometheus:            [viewer]

In a name, `*` matches any characters except `.` and `/`; a name of `*` alone matches every name of its kind. In models and
fleets, `*` matches any characters. A caller has the roles
of every row that matches one of its names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resharder.server.rpc.methods import Role
from resharder.server.security.identities import KINDS, identity

ALL = "*"
_OF = re.compile(r"[A-Za-z0-9*][A-Za-z0-9*._-]{0,63}")


@dataclass(frozen=True)
class Grant:
    """Role on a pattern of models (publisher) or fleets (server, node, operator)."""

    role: Role
    of: str = ALL

    def covers(self, name: str) -> bool:
        """Return whether the pattern matches the name of a model or fleet."""
        return re.fullmatch(re.escape(self.of).replace(r"\*", ".*"), name) is not None

    def __str__(self) -> str:
        return self.role.value if self.of == ALL and self.role in (Role.OPERATOR, Role.VIEWER) else f"{self.role.value}:{self.of}"


@dataclass(frozen=True)
class Row:
    """Row of the table: the pattern of its names, and its grants."""

    names: re.Pattern[str]
    grants: tuple[Grant, ...]


class Roles:
    """Parsed table of roles. Immutable, so thread-safe."""

    def __init__(self, table: Mapping[str, Sequence[str]]) -> None:
        """Parse the table. Raises ValueError, which names the row."""
        self._rows = [
            Row(_names(who), tuple(grant for role in roles for grant in _grants(who, role))) for who, roles in table.items()
        ]

    def of(self, identities: Iterable[str]) -> tuple[Grant, ...]:
        """Return the grants of a caller with these names, each once."""
        names = list(identities)
        found = (grant for row in self._rows if any(map(row.names.fullmatch, names)) for grant in row.grants)
        return tuple(dict.fromkeys(found))


def _names(who: str) -> re.Pattern[str]:
    kind, colon, name = who.partition(":")
    if not colon or kind not in KINDS or not name:
        raise ValueError(f"expected a row as KIND:NAME with a KIND of {', '.join(KINDS)}, got {who!r}")
    anything = ".*" if name == ALL else r"[^./]*"
    return re.compile(re.escape(identity(kind, name)).replace(r"\*", anything))


def _grants(who: str, text: str) -> tuple[Grant, ...]:
    """Return the grants of a role. An operator is a viewer as well."""
    name, colon, of = text.partition(":")
    if name not in {role.value for role in Role}:
        raise ValueError(f"{who}: expected a role of {', '.join(role.value for role in Role)}, got {text!r}")
    role = Role(name)
    if role in (Role.PUBLISHER, Role.SERVER, Role.NODE) and not colon:
        what = "model" if role is Role.PUBLISHER else "fleet"
        raise ValueError(f"{who}: expected {name}:{what.upper()}, or {name}:* for every {what}, got {text!r}")
    if colon and (role is Role.VIEWER or not _OF.fullmatch(of)):
        raise ValueError(f"{who}: expected {'viewer alone' if role is Role.VIEWER else 'a name after the colon'}, got {text!r}")
    grant = Grant(role, of or ALL)
    return (grant, Grant(Role.VIEWER)) if role is Role.OPERATOR else (grant,)
