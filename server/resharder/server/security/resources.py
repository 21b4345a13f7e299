"""The model or fleets that a request concerns, parsed in the same way as in the services."""

from dataclasses import replace
from typing import Any, Protocol

from resharder.server.rpc.admission import model_of_chunk
from resharder.server.rpc.methods import About, Method
from resharder.server.security.rules import Resource
from resharder.server.state.errors import unknown_server


class World(Protocol):
    """Fleets and servers, as far as access depends on them."""

    def only_model(self) -> str:
        """Return the name of the only model; empty without models. Raises InvalidArgument (MODEL_AMBIGUOUS)."""

    def following(self) -> dict[str, str]:
        """Return the model of every fleet by the fleet's name."""

    def fleet_of(self, server: str) -> str:
        """Return the fleet of a server; empty for an unknown server."""


def resource_of(method: Method, request: Any, world: World) -> Resource:
    """Return the resource of a request. Raises the errors of the service for an unknown server or an ambiguous model."""
    name = method.name
    if method.about in (About.NOTHING, About.EVERYTHING):
        return Resource()
    if name == "UploadChunks":
        return model(model_of_chunk(request), world)
    if name == "ClaimServer":
        return _claim(request, world)
    if hasattr(request, "member"):
        return _member(request, world)
    if name == "UpdateFleet":
        return _fleet(request.fleet.name, world)
    if method.about is About.FLEET:
        return _fleet(request.fleet, world) if hasattr(request, "fleet") else _server(request.server, world)
    if name == "CreatePublisher":
        return model(request.model.name, world)
    if name == "GetModel":
        return model(request.model.removeprefix("models/") or world.only_model(), world)
    if name in ("ListVersions", "GetSnapshot"):
        return model(request.model, world)
    return model(_model_in(getattr(request, "publisher", "") or getattr(request, "version", "")), world)


def model(name: str, world: World) -> Resource:
    """Return the resource of a model, with the fleets that follow it; for an empty name, one that no pattern covers."""
    if not name:
        return Resource("a model that it does not name")
    followers = (fleet for fleet, followed in (world.following() | _default(name, world)).items() if followed == name)
    return Resource(f"models/{name}", name, tuple(followers))


def _default(name: str, world: World) -> dict[str, str]:
    """Return a model's default fleet, which has its name and exists before any server."""
    return {} if name in world.following() else {name: name}


def _claim(request: Any, world: World) -> Resource:
    """Return the resource of a claim.

    Only operators create a fleet that is not a model's default one.
    """
    wanted = request.model.removeprefix("models/") or world.only_model()
    fleet = request.fleet or wanted
    there = world.following() | _default(wanted, world)
    if there.get(fleet) is None:
        return Resource(f"fleet {fleet!r}, which does not exist: an operator has to create it")
    known = world.fleet_of(request.server.removeprefix("servers/"))
    return Resource(f"fleets/{fleet}", "", tuple({fleet, known or fleet}))


def _server(name: str, world: World) -> Resource:
    id = name.removeprefix("servers/")
    fleet = world.fleet_of(id)
    if not fleet:
        raise unknown_server(id)
    return Resource(f"fleets/{fleet}", "", (fleet,))


def _member(request: Any, world: World) -> Resource:
    owner, version = request.member.owner, _model_in(getattr(request, "version", ""))
    if not owner.startswith("servers/"):
        named = _model_in(owner)
        return replace(model(named if version in ("", named) else "", world), fleets=())  # servers do not act for ranks
    found = _server(owner, world)
    if version and world.following().get(found.fleets[0]) != version:
        return Resource(f"models/{version}")
    return found


def _fleet(name: str, world: World) -> Resource:
    name = name.removeprefix("fleets/")
    there = name in world.following()
    return Resource(f"fleets/{name}", "", (name,) if there else ())


def _model_in(name: str) -> str:
    """Return the model in models/{model}/…; empty for other names, which the services refuse."""
    parts = name.split("/")
    return parts[1] if len(parts) == 4 and parts[0] == "models" else ""
