"""The plugin's settings, read from `RESHARDER_*` variables and checked in one place."""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Self

from resharder.client.errors import UsageError
from resharder.client.rpc.tls import Tls
from resharder.converters.allowances import unknown_names
from resharder.converters.wire.endpoint import check_endpoint, route_options

GRPC, HTTP = "grpc", "http"
CONFIG_CHANGE = "RESHARDER_ON_CONFIG_CHANGE"
FAULTS = ("skip", "misplace", "swap", "half-way")
_LONGEST_BOOT_WAIT = 3600.0  # seconds; the daemon has the same bound
_ELSEWHERE = "192.0.2.1", "2001:db8::1"  # addresses of documentation: only the route to them is looked up
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(r"(([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?|[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*)?")


@dataclass(frozen=True)
class PluginSettings:
    """The daemon's address, the server's identity, and how versions reach the server. `docs/vllm.md` lists the variables."""

    endpoint: str
    """The daemon's `host:port`."""
    server: str
    """The server's id."""
    model: str = ""
    """The model to follow; empty selects the daemon's only model."""
    fleet: str = ""
    """The fleet to join; empty selects the fleet that has the model's name."""
    prefer: bool = False
    """Start on vLLM's own weights if the daemon has no version, and serve them until the first one arrives."""
    hold_seconds: float = 30.0
    """Time for which requests wait at the gate for an install."""
    boot_wait_seconds: float = 600.0
    """Time for which a boot waits for the daemon and a READY version."""
    transport: str = ""
    """`http` if the daemon's files must not be mapped, `grpc` if they must not be read by HTTP either, else empty."""
    staging_dir: str = "/dev/shm"
    """Folder for slices that arrive over the network."""
    direct: bool = True
    """Whether versions may arrive on the direct path."""
    verify_seconds: float = 600.0
    """Interval between verifications of memory; 0 verifies on request only."""
    update_seconds: float = 240.0
    """Time for which `finish_weight_update` of vLLM's API waits for a version to be served."""
    address: str = ""
    """Address at which others reach the server, as host or host:port; empty selects the host's routable address."""
    restarts: bool = False
    """End the process for a version of another config.json, so that its supervisor starts it again, instead of refusing it."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read and check the settings. An empty variable counts as unset.

        Raises:
            UsageError: A variable is invalid; the message names it.
        """
        given = {name: value for name, value in environment.items() if value}
        fault(given)
        if problem := unknown_names(given):
            raise UsageError(problem)
        Tls.from_environment(given)
        return cls(
            endpoint=_endpoint(given),
            server=_server(given),
            model=_name(given, "RESHARDER_MODEL"),
            fleet=_name(given, "RESHARDER_FLEET"),
            prefer=_one_of(given, "RESHARDER_UNREACHABLE", ("require", "prefer")) == "prefer",
            restarts=_one_of(given, CONFIG_CHANGE, ("refuse", "exit")) == "exit",
            hold_seconds=_seconds(given, "RESHARDER_HOLD_SECONDS", cls.hold_seconds),
            boot_wait_seconds=_seconds(given, "RESHARDER_BOOT_WAIT_SECONDS", cls.boot_wait_seconds, _LONGEST_BOOT_WAIT),
            transport=_one_of(given, "RESHARDER_TRANSPORT", ("", HTTP, GRPC)),
            staging_dir=_folder(given, "RESHARDER_STAGING_DIR", cls.staging_dir),
            direct=_one_of(given, "RESHARDER_DIRECT", ("on", "off")) == "on",
            verify_seconds=_seconds(given, "RESHARDER_VERIFY_SECONDS", cls.verify_seconds),
            update_seconds=_seconds(given, "RESHARDER_UPDATE_SECONDS", cls.update_seconds),
            address=_address(given),
        )


def fault(environment: Mapping[str, str] = os.environ) -> tuple[str, tuple[str, ...]]:
    """Return the fault that a test injects with `RESHARDER_FAULT`.

    Returns:
        One of `FAULTS` and the HF tensors that it affects; `("", ())` without a fault.

    Raises:
        UsageError: The variable is invalid.
    """
    given = environment.get("RESHARDER_FAULT", "")
    if not given:
        return "", ()
    kind, _, names = given.partition(":")
    named = tuple(name for name in names.split(",") if name)
    if kind not in FAULTS or len(named) != {"half-way": 0, "swap": 2}.get(kind, 1):
        raise UsageError(f"expected skip:NAME, misplace:NAME, swap:NAME,NAME or half-way in RESHARDER_FAULT, got {given!r}")
    return kind, named


def _endpoint(given: Mapping[str, str]) -> str:
    try:
        route_options(given)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not given.get("RESHARDER_ENDPOINT"):
        raise UsageError("expected the daemon's endpoint as host:port in RESHARDER_ENDPOINT, got none")
    try:
        return check_endpoint(given["RESHARDER_ENDPOINT"])
    except ValueError as error:
        raise UsageError(f"RESHARDER_ENDPOINT: {error}") from error


def _address(given: Mapping[str, str]) -> str:
    address = given.get("RESHARDER_ADDRESS", "")
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"expected a host or host:port in RESHARDER_ADDRESS, got {address!r}")
    return address


def _server(given: Mapping[str, str]) -> str:
    server = given.get("RESHARDER_SERVER_ID", "")
    if not _NAME.fullmatch(server):
        raise UsageError(
            "expected the server's id in RESHARDER_SERVER_ID (letters, digits, '.', '_', '-', at most 64; the general plugin "
            f"generates one if the variable is unset), got {server or 'none'}"
        )
    return server


def _name(given: Mapping[str, str], variable: str) -> str:
    name = given.get(variable, "")
    if name and not _NAME.fullmatch(name):
        raise UsageError(f"expected at most 64 letters, digits, '.', '_' and '-' in {variable}, got {name!r}")
    return name


def _one_of(given: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    """Return the variable's value, by default the first of `choices`."""
    choice = given.get(name, choices[0])
    if choice not in choices:
        raise UsageError(f"expected {' or '.join(c or 'nothing' for c in choices)} in {name}, got {choice!r}")
    return choice


def _seconds(given: Mapping[str, str], name: str, default: float, longest: float = float("inf")) -> float:
    text = given.get(name)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and 0 <= seconds <= longest):
        bound = f" of 0 to {longest:g}" if isfinite(longest) else ""
        raise UsageError(f"expected seconds{bound} in {name}, got {text!r}")
    return seconds


def _folder(given: Mapping[str, str], name: str, default: str) -> str:
    folder = given.get(name, default)
    if not os.path.isdir(folder):
        raise UsageError(f"expected a folder in {name}, got {folder!r}")
    return folder


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
    daemon, _, port = endpoint.rpartition(":")
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
