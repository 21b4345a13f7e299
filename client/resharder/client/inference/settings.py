"""The settings of a vLLM server, from the variables that `client/settings.py` declares, and its address."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from resharder.client import settings
from resharder.client.errors import UsageError
from resharder.client.rpc.tls import Tls
from resharder.converters.allowances import unknown_names
from resharder.converters.wire.endpoint import addresses_of, check_endpoint, route_options

_ELSEWHERE = "192.0.2.1", "2001:db8::1"  # addresses of documentation: only the route to them is looked up


@dataclass(frozen=True)
class PluginSettings:
    """The daemon's address, the server's identity, and how versions reach the server: a field for each variable."""

    endpoint: str
    server: str
    model: str = settings.MODEL.unset
    fleet: str = settings.FLEET.unset
    prefer: bool = False
    """RESHARDER_UNREACHABLE=prefer: start on vLLM's own weights if the daemon has no version."""
    hold_seconds: float = settings.HOLD_SECONDS.unset
    boot_wait_seconds: float = settings.BOOT_WAIT_SECONDS.unset
    transport: str = settings.TRANSPORT.unset
    staging_dir: str = settings.STAGING_DIR.unset
    direct: bool = True
    verify_seconds: float = settings.VERIFY_SECONDS.unset
    update_seconds: float = settings.UPDATE_SECONDS.unset
    address: str = settings.ADDRESS.unset
    restarts: bool = False
    """RESHARDER_ON_CONFIG_CHANGE=exit: end for a version of another config.json, to be started again."""
    adapters: tuple[tuple[str, str], ...] = settings.ADAPTERS.unset
    """Adapters to follow beside the model, each with its fleet; empty for the adapter's default fleet."""
    base_server: str = ""
    """For the settings of an adapter's own server: the server that it is loaded into."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """Read and check the settings. An empty variable counts as unset.

        Raises:
            UsageError: A variable is invalid; the message names it.
        """
        settings.FAULT.read(environment)
        if problem := unknown_names(environment):
            raise UsageError(problem)
        Tls.from_environment(environment)
        return cls(
            endpoint=_endpoint(environment),
            server=_server(environment),
            model=settings.MODEL.read(environment),
            fleet=settings.FLEET.read(environment),
            prefer=settings.UNREACHABLE.read(environment) == "prefer",
            restarts=settings.ON_CONFIG_CHANGE.read(environment) == "exit",
            hold_seconds=settings.HOLD_SECONDS.read(environment),
            boot_wait_seconds=settings.BOOT_WAIT_SECONDS.read(environment),
            transport=settings.TRANSPORT.read(environment),
            staging_dir=settings.STAGING_DIR.checked(environment),
            direct=settings.DIRECT.read(environment) == "on",
            verify_seconds=settings.VERIFY_SECONDS.read(environment),
            update_seconds=settings.UPDATE_SECONDS.read(environment),
            address=settings.ADDRESS.read(environment),
            adapters=settings.ADAPTERS.read(environment),
        )

    def of_adapter(self, index: int) -> Self:
        """Return the settings of the server that the daemon has for the adapter at `index`.

        Raises:
            UsageError: Its id, made of the server's and the adapter's, is too long.
        """
        model, fleet = self.adapters[index]
        server = f"{self.server}.{model}"
        if not settings.NAME.fullmatch(server):
            raise UsageError(
                f"the daemon would know adapter {model} of this server as {server}, which is longer than 64 letters: choose a "
                "shorter RESHARDER_SERVER_ID"
            )
        return replace(self, server=server, model=model, fleet=fleet, adapters=(), base_server=self.server, direct=False)


def _endpoint(environment: Mapping[str, str] | None) -> str:
    if not (endpoint := settings.ENDPOINT.read(environment)):
        raise UsageError("RESHARDER_ENDPOINT is not set: set it to the daemon's host:port")
    try:
        check_endpoint(endpoint)
    except ValueError as error:
        raise UsageError(f"RESHARDER_ENDPOINT: {error}") from error
    try:
        route_options(environment, endpoint)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return endpoint


def _server(environment: Mapping[str, str] | None) -> str:
    server = settings.SERVER_ID.read(environment)
    if not settings.NAME.fullmatch(server):
        raise UsageError(
            "expected the server's id in RESHARDER_SERVER_ID (letters, digits, '.', '_', '-', at most 64; the general plugin "
            f"generates one if the variable is unset), got {server or 'none'}"
        )
    return server


def server_address(given: str, host: str | None, port: int, endpoint: str) -> str:
    """Return the address that a server reports to the daemon: one that operators, trainers and checks of canaries can reach.

    Args:
        given: RESHARDER_ADDRESS, as host or host:port; empty if unset.
        host: Host that the server listens on; None for all.
        port: Port that the server listens on.
        endpoint: The daemon's `host:port`.

    Returns:
        `host:port`. In place of the unspecified address (`0.0.0.0`, `::`), the address of this host on the route to the daemon;
        if that is the loopback, on the default route.
    """
    if given:
        named = given.rpartition("]")[2] if given.startswith("[") else given
        return given if named.count(":") == 1 else f"{_bracketed(given)}:{port}"
    return f"{_bracketed(_routable(endpoint) if _is_unspecified(host) else str(host))}:{port}"


def _is_unspecified(host: str | None) -> bool:
    try:
        return not host or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _routable(endpoint: str) -> str:
    daemon, _, port = addresses_of(endpoint)[0].rpartition(":")
    found = [_source(host.strip("[]"), int(port)) for host in (daemon, *_ELSEWHERE)]
    usable = [address for address in found if address and not ipaddress.ip_address(address).is_loopback]
    return usable[0] if usable else "127.0.0.1"


def _source(host: str, port: int) -> str:
    """Return this host's address on the route to another; empty without a route. Sends nothing."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.connect(target)
            return str(trial.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
