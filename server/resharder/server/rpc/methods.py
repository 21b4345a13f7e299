"""Table of all RPC methods: roles, resource and cost."""

from dataclasses import dataclass
from enum import Enum, auto


class Role(Enum):
    """Role of a caller, as the configuration names it."""

    PUBLISHER = "publisher"  # of models
    SERVER = "server"  # of fleets
    NODE = "node"  # of fleets, whose versions it may hold
    OPERATOR = "operator"
    VIEWER = "viewer"


class About(Enum):
    """Resource that a role must cover to permit a call."""

    NOTHING = auto()  # having the role is enough
    MODEL = auto()  # the model, or for a server a fleet that follows it
    FLEET = auto()  # the fleets that are commanded, or that a server reports on
    EVERYTHING = auto()


class Cost(Enum):
    """Resources that a call occupies. Places of `WAIT` and `TRANSFER` are configured (`threads`, `transfers`)."""

    SHORT = auto()
    RENEWAL = auto()  # renews a lease: runs on threads of its own
    WAIT = auto()  # may stay open for long while idle
    TRANSFER = auto()  # transfers or computes much data

    @property
    def long(self) -> bool:
        """Whether open calls of this cost are counted and bounded."""
        return self in (Cost.WAIT, Cost.TRANSFER)


@dataclass(frozen=True)
class Method:
    """RPC method. An empty `who` permits every caller. A `large` request may have `max_message_bytes` instead of 1 MiB."""

    service: str
    name: str
    who: frozenset[Role]
    about: About
    cost: Cost = Cost.SHORT
    large: bool = False

    @property
    def path(self) -> str:
        """Path of the method in HTTP/2, `/service/name`."""
        return f"/{self.service}/{self.name}"


_NODE = frozenset({Role.NODE})
_PUBLISHER, _SERVER, _OPERATOR = frozenset({Role.PUBLISHER}), frozenset({Role.SERVER}), frozenset({Role.OPERATOR})
_READER = frozenset({Role.PUBLISHER, Role.SERVER, Role.OPERATOR})
_COPIER = _READER | _NODE
_MEMBER = frozenset({Role.PUBLISHER, Role.SERVER})
_VIEWER = frozenset({Role.VIEWER})
_ANY_ROLE = frozenset(Role)
_EVERY_CALLER: frozenset[Role] = frozenset()

OURS = "resharder.v1."
_P, _S, _O, _D, _N = (f"{OURS}{name}Service" for name in ("Publisher", "Server", "Operator", "Direct", "Node"))
_HEALTH, _REFLECTION = "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"

METHODS = (
    Method(_P, "CreatePublisher", _PUBLISHER, About.MODEL, large=True),
    Method(_P, "RegisterSlot", _PUBLISHER, About.MODEL, Cost.TRANSFER, large=True),
    Method(_P, "GetAssignment", _PUBLISHER, About.MODEL, Cost.WAIT),
    Method(_P, "RenewLease", _PUBLISHER, About.MODEL, Cost.RENEWAL),
    Method(_P, "CreateVersion", _PUBLISHER, About.MODEL, Cost.WAIT),
    Method(_P, "ExchangeMaxima", _PUBLISHER, About.MODEL, Cost.WAIT, large=True),
    Method(_P, "UploadChunks", _PUBLISHER, About.MODEL, Cost.TRANSFER, large=True),
    Method(_P, "ListMissingChunks", _PUBLISHER, About.MODEL),
    Method(_P, "ReleaseFiles", _PUBLISHER, About.MODEL),
    Method(_P, "ThawFiles", _PUBLISHER, About.MODEL, Cost.TRANSFER),
    Method(_P, "SealSlot", _PUBLISHER, About.MODEL, large=True),
    Method(_P, "AbortVersion", _PUBLISHER, About.MODEL),
    Method(_P, "WaitVersion", _PUBLISHER, About.MODEL, Cost.WAIT),
    Method(_S, "ClaimServer", _SERVER, About.FLEET, Cost.WAIT),
    Method(_S, "Attend", _SERVER, About.FLEET, Cost.WAIT),
    Method(_S, "ReportWorker", _SERVER, About.FLEET, Cost.RENEWAL),
    Method(_S, "PutProfile", _SERVER, About.FLEET, Cost.TRANSFER, large=True),
    Method(_S, "GetManifest", _COPIER, About.MODEL, Cost.TRANSFER),
    Method(_S, "GetNextFiles", _READER, About.MODEL),
    Method(_S, "DigestBoxes", _READER, About.MODEL, Cost.TRANSFER, large=True),
    Method(_S, "DownloadChunks", _COPIER, About.MODEL, Cost.TRANSFER, large=True),
    Method(_S, "GetModel", _READER, About.MODEL),
    Method(_O, "GetDaemon", _ANY_ROLE, About.NOTHING),  # its answer and those of lists are redacted: security/redaction.py
    Method(_O, "ListVersions", _ANY_ROLE, About.MODEL),
    Method(_O, "GetVersion", _ANY_ROLE, About.MODEL),
    Method(_O, "ListServers", _ANY_ROLE, About.NOTHING),
    Method(_O, "ListFleets", _ANY_ROLE, About.NOTHING),
    Method(_O, "ListNodes", _VIEWER, About.NOTHING),
    Method(_O, "ListEvents", _VIEWER, About.NOTHING, Cost.WAIT),
    Method(_O, "ListArchive", _VIEWER, About.NOTHING, Cost.TRANSFER),
    Method(_O, "ExportVersion", _READER, About.MODEL, Cost.TRANSFER),
    Method(_O, "UpdateFleet", _OPERATOR, About.FLEET),
    Method(_O, "RollBackFleet", _OPERATOR, About.FLEET),
    Method(_O, "DecideMove", _OPERATOR, About.FLEET),
    Method(_O, "SetPower", _OPERATOR, About.FLEET),
    Method(_O, "SetDrained", _OPERATOR, About.FLEET),
    Method(_O, "SetNodeDrained", _OPERATOR, About.EVERYTHING),
    Method(_O, "DeleteFleet", _OPERATOR, About.FLEET),
    Method(_O, "ForgetServer", _OPERATOR, About.FLEET),
    Method(_O, "ProfileInstall", _OPERATOR, About.FLEET, Cost.WAIT),
    Method(_O, "VerifyServer", _OPERATOR, About.FLEET, Cost.WAIT),
    Method(_O, "RetireVersions", _OPERATOR, About.EVERYTHING),
    Method(_O, "ArchiveVersion", _OPERATOR, About.EVERYTHING, Cost.TRANSFER),
    Method(_O, "RestoreVersion", _OPERATOR, About.EVERYTHING, Cost.TRANSFER),
    Method(_D, "DeclareMemory", _MEMBER, About.FLEET, Cost.TRANSFER, large=True),
    Method(_D, "OfferVersion", _MEMBER, About.FLEET, Cost.WAIT),
    Method(_D, "JoinTransfer", _MEMBER, About.FLEET, Cost.WAIT),
    Method(_D, "MeetRanks", _MEMBER, About.FLEET, Cost.WAIT),
    Method(_D, "StartTransfer", _MEMBER, About.FLEET, Cost.WAIT),
    Method(_D, "FinishTransfer", _MEMBER, About.FLEET),
    Method(_D, "PutDigests", _MEMBER, About.FLEET, large=True),
    Method(_D, "GetDigests", _MEMBER, About.FLEET, Cost.WAIT),
    # A group's id is a secret that the daemon sends to its members only.
    Method(_D, "SetGroupKey", _MEMBER, About.NOTHING, large=True),
    Method(_D, "GetGroupKey", _MEMBER, About.NOTHING, Cost.WAIT, large=True),
    Method(_N, "SyncNode", _NODE, About.NOTHING, Cost.RENEWAL),
    Method(_N, "GetPieceChecksums", _NODE, About.MODEL, Cost.TRANSFER),
    Method(_N, "GetHostVersion", _SERVER, About.MODEL),
    Method(_N, "GetReservedFiles", _NODE, About.MODEL, Cost.TRANSFER),
    Method(_N, "PutFileProof", _NODE, About.MODEL, large=True),
    Method(_N, "GetSnapshot", _NODE, About.MODEL, Cost.TRANSFER),
    Method(_N, "PutSnapshots", _NODE, About.NOTHING, Cost.TRANSFER, large=True),
    Method(_HEALTH, "Check", _EVERY_CALLER, About.NOTHING, Cost.RENEWAL),
    Method(_HEALTH, "Watch", _EVERY_CALLER, About.NOTHING, Cost.WAIT),
    Method(_HEALTH, "List", _EVERY_CALLER, About.NOTHING),
    Method(_REFLECTION, "ServerReflectionInfo", _ANY_ROLE, About.NOTHING, Cost.WAIT),
)
REPLICATE = Method(_S, "GetManifest", _NODE, About.MODEL, Cost.TRANSFER)
"""`GetManifest` with `replica`, and reads of pieces from the data port before READY."""
SERVICES = tuple(dict.fromkeys(method.service for method in METHODS))
BY_PATH = {method.path: method for method in METHODS}
