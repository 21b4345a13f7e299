"""The environment of clients: every variable that trainers, the command and the vLLM plugin read.

docs/configuration.md and docs/reference/vllm.md have tables of them, made from here.
"""

import logging
import os
import re
from collections.abc import Callable
from math import isfinite

from resharder.client.errors import UsageError
from resharder.converters.environment import ALLOW, PROXY, Variable, names, text

logger = logging.getLogger(__name__)
FAULTS = ("skip", "misplace", "swap", "half-way")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ADDRESS = re.compile(r"([A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?|[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*")


def _name(variable: str, given: str) -> str:
    if not NAME.fullmatch(given):
        raise UsageError(f"expected at most 64 letters, digits, '.', '_' and '-' in {variable}, got {given!r}")
    return given


def _address(variable: str, given: str) -> str:
    if not _ADDRESS.fullmatch(given):
        raise UsageError(f"expected a host or host:port in {variable}, got {given!r}")
    return given


def _folder(variable: str, given: str) -> str:
    if not os.path.isdir(given):
        raise UsageError(f"expected a folder in {variable}, got {given!r}")
    return given


def _fault(variable: str, given: str) -> tuple[str, tuple[str, ...]]:
    kind, _, after = given.partition(":")
    named = tuple(name for name in after.split(",") if name)
    if kind not in FAULTS or len(named) != {"half-way": 0, "swap": 2}.get(kind, 1):
        raise UsageError(f"expected skip:NAME, misplace:NAME, swap:NAME,NAME or half-way in {variable}, got {given!r}")
    return kind, named


def _seconds(longest: float = float("inf")) -> Callable[[str, str], float]:
    def parse(variable: str, given: str) -> float:
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not (isfinite(seconds) and 0 <= seconds <= longest):
            bound = f" of 0 to {longest:g}" if isfinite(longest) else ""
            raise UsageError(f"expected seconds{bound} in {variable}, got {given!r}")
        return seconds

    return parse


def _duration(name: str, unset: float, meaning: str, longest: float = float("inf")) -> Variable[float]:
    return Variable(name, unset, _seconds(longest), meaning, f"{unset:g}")


def _choice(name: str, choices: tuple[str, ...], meaning: str, default: str = "") -> Variable[str]:
    """Return a variable that has one of `choices`, by default the first."""

    def parse(variable: str, given: str) -> str:
        if given not in choices:
            raise UsageError(f"expected {' or '.join(each or 'nothing' for each in choices)} in {variable}, got {given!r}")
        return given

    return Variable(name, choices[0], parse, meaning, default or (f"`{choices[0]}`" if choices[0] else ""))


ENDPOINT = text(
    "RESHARDER_ENDPOINT",
    "the daemon's `host:port`, without `http://`, an IPv6 address in brackets; by default `127.0.0.1:7677`. With "
    "[standbys](standby.md), a name that resolves to all of them, or all addresses with commas between them. In a vLLM "
    "server without it and without `--load-format resharder`, the plugin does nothing",
    "`127.0.0.1:7677`",
)
TLS_CA = text("RESHARDER_TLS_CA", "PEM file with the authority of the daemon's certificate. Turns [TLS](security.md) on")
TLS_CERT = text("RESHARDER_TLS_CERT", "PEM file with the client's certificate")
TLS_KEY = text("RESHARDER_TLS_KEY", "PEM file with its key")
TLS_NAME = text("RESHARDER_TLS_NAME", "name in the daemon's certificate, if it differs from the endpoint's")
TOKEN = text("RESHARDER_TOKEN", "token of the client")
TOKEN_FILE = text("RESHARDER_TOKEN_FILE", "file that contains the token, read again for each call")
TLS = (TLS_CA, TLS_CERT, TLS_KEY, TLS_NAME, TOKEN, TOKEN_FILE)
"""In the order of the fields of `Tls`."""
JOB = text("RESHARDER_JOB", "id of the training job, shared by its ranks")
MODEL = Variable(
    "RESHARDER_MODEL",
    "",
    _name,
    "model that a vLLM server follows. Also the model's name for [vLLM's weight transfer API](frameworks.md) in a trainer",
    "the daemon's only model",
)


def _adapters(variable: str, given: str) -> tuple[tuple[str, str], ...]:
    found = tuple((model, fleet) for model, _, fleet in (part.strip().partition(":") for part in given.split(",")))
    names = [name for pair in found for name in pair if name]
    if not all(NAME.fullmatch(name) for name in names) or not all(model for model, _ in found):
        raise UsageError(f"expected MODEL or MODEL:FLEET, separated by commas, in {variable}, got {given!r}")
    if len({model for model, _ in found}) < len(found):
        raise UsageError(f"{variable} names an adapter twice: {given!r}")
    return found


_NO_ADAPTERS: tuple[tuple[str, str], ...] = ()
ADAPTERS = Variable(
    "RESHARDER_ADAPTERS",
    _NO_ADAPTERS,
    _adapters,
    "[adapters](adapters.md) that a server with `--enable-lora` follows beside its model: `MODEL` or `MODEL:FLEET`, separated by "
    "commas",
)
FLEET = Variable("RESHARDER_FLEET", "", _name, "fleet that a vLLM server joins", "the model's name")
SERVER_ID = text(
    "RESHARDER_SERVER_ID",
    "the server's name: letters, digits, `.`, `_`, `-`, at most 64. Set it for a name that survives restarts",
    "random, made by the first process and inherited",
)
ADDRESS = Variable(
    "RESHARDER_ADDRESS",
    "",
    _address,
    "address at which others reach the server, as host or host:port. If the server listens on all addresses, the default is the "
    "host's address on the route to the daemon",
    "`--host` and `--port`",
)
UNREACHABLE = _choice(
    "RESHARDER_UNREACHABLE",
    ("require", "prefer"),
    "`require`: do not start without the daemon and a READY version, and take no traffic before one is confirmed. "
    "`prefer`: after 5 s without a daemon, or at once if it has no version, load as vLLM would (the model's folder then needs "
    "weights), and serve those weights until the first version arrives",
)
ON_CONFIG_CHANGE = _choice(
    "RESHARDER_ON_CONFIG_CHANGE",
    ("refuse", "exit"),
    "for a version of [another config](vllm.md#the-versions-config). `refuse`: keep serving the present one. `exit`: end with "
    "status 75, to be started again; needs `RESHARDER_SERVER_ID`",
)
BOOT_WAIT_SECONDS = _duration(
    "RESHARDER_BOOT_WAIT_SECONDS",
    600.0,
    "time for which `--load-format resharder` waits for the daemon and a READY version; at most 3600",
    3600.0,  # the daemon has the same bound
)
HOLD_SECONDS = _duration(
    "RESHARDER_HOLD_SECONDS", 30.0, "time for which requests wait for an install before they are answered 503"
)
HTTP = "http"


def _transport(variable: str, given: str) -> str:
    if given == "grpc":
        logger.warning("%s=grpc is read as http: versions come from the daemon's data port alone. Set it to http", variable)
        return HTTP
    if given not in ("", HTTP):
        raise UsageError(f"expected nothing or {HTTP} in {variable}, got {given!r}")
    return given


TRANSPORT = Variable(
    "RESHARDER_TRANSPORT",
    "",
    _transport,
    "`http`: read versions from the daemon's [data port](operator.md#beyond-one-host), even on its host, in place of its files "
    "or a node's",
)
STAGING_DIR = Variable(
    "RESHARDER_STAGING_DIR", "/dev/shm", _folder, "folder for slices that arrive over the network", "`/dev/shm`"
)
DIRECT = _choice("RESHARDER_DIRECT", ("on", "off"), "`off`: do not use the [direct path](direct-path.md)")
PEER_MEMORY = text(
    "RESHARDER_PEER_MEMORY",
    "`off`: do not map the memory of [processes on the same host](direct-path.md#peer-memory); `cpu`: do so on CPUs too. Also "
    "for ranks",
    "on GPUs",
)
NIXL = _choice(
    "RESHARDER_NIXL",
    ("", "on", "off"),
    "[NIXL](direct-path.md#nixl), where it is installed. `off`: do not use it; `on`: also without an RDMA device, and between "
    "processes of one host that both have `on`. Also for ranks",
    "between hosts with RDMA",
)
VERIFY_SECONDS = _duration(
    "RESHARDER_VERIFY_SECONDS", 600.0, "interval between [verifications](vllm.md#other-hands) of memory; 0: on request only"
)
UPDATE_SECONDS = _duration(
    "RESHARDER_UPDATE_SECONDS",
    240.0,
    "time for which `finish_weight_update` of [vLLM's API](frameworks.md) waits for the version",
)
_NO_FAULT: tuple[str, tuple[str, ...]] = "", ()
FAULT = Variable("RESHARDER_FAULT", _NO_FAULT, _fault, "for tests: makes an install fail")
NODE_TLS_PEER_NAME = text("RESHARDER_NODE_TLS_PEER_NAME")  # also an option of nodes

OF_ALL: tuple[Variable[object], ...] = (ENDPOINT, *TLS, PROXY, JOB, MODEL, PEER_MEMORY, NIXL, ALLOW)
"""Variables of trainers, the command and vLLM servers."""
OF_SERVERS: tuple[Variable[object], ...] = (
    ADAPTERS, FLEET, SERVER_ID, ADDRESS, UNREACHABLE, ON_CONFIG_CHANGE, BOOT_WAIT_SECONDS, HOLD_SECONDS, TRANSPORT, STAGING_DIR,
    DIRECT, VERIFY_SECONDS, UPDATE_SECONDS, FAULT,
)  # fmt: skip
"""Variables of vLLM servers alone."""

# Variables that the processes of a server inherit from each other.
PAGE = text("RESHARDER_PAGE")
WARNED_OF_VLLM = text("RESHARDER_WARNED_OF_VLLM")  # so that a server warns once
WARNED_OF_SGLANG = text("RESHARDER_WARNED_OF_SGLANG")

# Variables of others.
GLOO_INTERFACES = text("GLOO_SOCKET_IFNAME")  # as torch reads it: names, separated by commas
RANK, WORLD_SIZE, LOCAL_WORLD_SIZE = text("RANK"), text("WORLD_SIZE"), text("LOCAL_WORLD_SIZE")
VLLM_PLUGINS = names("VLLM_PLUGINS")
VLLM_RAY_PREFIXES = names("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY")
VLLM_RUST_FRONTEND = text("VLLM_USE_RUST_FRONTEND")
VLLM_RUNTIME_LORA = text("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
VLLM_LOGGING_LEVEL = text("VLLM_LOGGING_LEVEL")
SGLANG_RUST_SERVER = text("SGLANG_RUST_SERVER")
