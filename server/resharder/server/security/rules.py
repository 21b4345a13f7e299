"""Decision whether a caller may make a call, from its roles and the table of methods."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from resharder.server.rpc.methods import About, Method, Role
from resharder.server.security.roles import ALL, Grant


@dataclass(frozen=True)
class Resource:
    """Resource of a request. `fleets` are its own, or those of `model`; none for a fleet that does not exist."""

    name: str = ""
    model: str = ""
    fleets: tuple[str, ...] = ()


def lacks_role(grants: Collection[Grant], method: Method) -> str:
    """Return why a caller may not make a call on any resource; empty if it may."""
    if not method.who or any(grant.role in method.who for grant in grants):
        return ""
    return f"expected a role of {_listed(role.value for role in method.who)}, got {_listed(map(str, grants))}"


def decide(grants: Collection[Grant], method: Method, resource: Resource) -> str:
    """Return why a caller with these roles may not make a call about a resource; empty if it may."""
    if refusal := lacks_role(grants, method):
        return refusal
    having = [grant for grant in grants if grant.role in method.who]
    if not method.who or method.about is About.NOTHING or any(_covers(grant, method.about, resource) for grant in having):
        return ""
    return f"expected a role for {resource.name or 'everything'}, got {_listed(map(str, having))}"


def _covers(grant: Grant, about: About, resource: Resource) -> bool:
    match grant.role:
        case Role.VIEWER:
            return about is About.MODEL
        case Role.PUBLISHER:
            return bool(resource.model) and grant.covers(resource.model)
        case Role.SERVER | Role.NODE if about is About.MODEL:
            return any(map(grant.covers, resource.fleets))
        case Role.NODE:
            return False
        case Role.OPERATOR if about is not About.FLEET or grant.of == ALL:
            return grant.of == ALL
        case Role.SERVER | Role.OPERATOR:
            return bool(resource.fleets) and all(map(grant.covers, resource.fleets))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
