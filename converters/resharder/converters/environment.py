"""The environment of this process, read here alone: each variable is declared once, with its type, default and meaning.

Here are those of the converters. The clients' are in `client/settings.py`.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Variable(Generic[T_co]):
    """A variable of the environment. An empty one counts as unset.

    Args:
        name: Its name.
        unset: What `read` returns if it is unset.
        parse: Checks and converts a text, given the variable's name.
        meaning: What a page says of it, in Markdown; empty for one that no page has.
        default: What a page shows as its default.
    """

    name: str
    unset: T_co
    parse: Callable[[str, str], T_co]
    meaning: str = ""
    default: str = ""

    def read(self, environment: Mapping[str, str] | None = None) -> T_co:
        """Return the value. Raises what `parse` raises."""
        given = self.text(environment)
        return self.parse(self.name, given) if given else self.unset

    def checked(self: "Variable[str]", environment: Mapping[str, str] | None = None) -> str:
        """Return the value, whose default is checked too. Raises what `parse` raises."""
        return self.parse(self.name, self.text(environment) or self.unset)

    def text(self, environment: Mapping[str, str] | None = None) -> str:
        """Return the value as it is given; empty if it is unset."""
        return (os.environ if environment is None else environment).get(self.name, "")

    def set(self, text: str, environment: MutableMapping[str, str] | None = None) -> None:
        """Set the variable for this process and those that it starts."""
        (os.environ if environment is None else environment)[self.name] = text

    def set_default(self, text: str) -> None:
        """Set the variable unless it is in the environment."""
        os.environ.setdefault(self.name, text)


def text(name: str, meaning: str = "", default: str = "") -> Variable[str]:
    """Return a variable whose value is taken as it is."""
    return Variable(name, "", lambda _, given: given, meaning, default)


def names(name: str, meaning: str = "", default: str = "") -> Variable[tuple[str, ...]]:
    """Return a variable with names, separated by commas."""
    return Variable(name, (), lambda _, given: tuple(part.strip() for part in given.split(",") if part.strip()), meaning, default)


ALLOW = names("RESHARDER_ALLOW", "names of [refusals](configuration.md#refusals) that become warnings, separated by commas")
PROXY = text(
    "RESHARDER_PROXY",
    "`http://host:port` of an HTTP proxy (CONNECT) for calls to the daemon; nodes read it too. `http_proxy`, `https_proxy` and "
    "`grpc_proxy` are not used, hosts in `no_proxy` are reached directly. The [data port](operator.md#beyond-one-host) is "
    "reached directly, and versions are read through the proxy if it cannot be",
)
FAILPOINT = text("RESHARDER_FAILPOINT")
FAILPOINT_MARK = text("RESHARDER_FAILPOINT_MARK")
