"""Which roles each call wants, and the decision. A call without an entry is refused to everybody."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from resharder.server.security.roles import ALL, Grant, Role

SMALL_BYTES = 1 << 20


class About(Enum):
    """What a role has to cover."""

    NOTHING = auto()  # having the role is enough
    MODEL = auto()  # the model, or for a server a fleet that follows it
    FLEET = auto()  # the fleets that are commanded or spoken for
    EVERYTHING = auto()


@dataclass(frozen=True)
class Rule:
    """`who`: empty for everybody who can connect. `large`: its messages are bounded by the daemon's `max_message_bytes` alone."""

    who: frozenset[Role]
    about: About
    large: bool = False


@dataclass(frozen=True)
class Resource:
    """What a request is about. `fleets`: those that it speaks for, or that follow `model`; none for a fleet that is not there."""

    name: str = ""
    model: str = ""
    fleets: tuple[str, ...] = ()


_ANY = frozenset(Role)
_READERS = frozenset({Role.PUBLISHER, Role.SERVER, Role.OPERATOR})
_MEMBERS = frozenset({Role.PUBLISHER, Role.SERVER})

EVERYBODY = Rule(frozenset(), About.NOTHING)
WITH_A_ROLE = Rule(_ANY, About.NOTHING)
WRITES = Rule(frozenset({Role.PUBLISHER}), About.MODEL)
WRITES_MUCH = Rule(WRITES.who, About.MODEL, large=True)
READS = Rule(_READERS, About.MODEL)
READS_MUCH = Rule(_READERS, About.MODEL, large=True)
SERVES = Rule(frozenset({Role.SERVER}), About.FLEET)
SERVES_MUCH = Rule(SERVES.who, About.FLEET, large=True)
LOOKS = Rule(frozenset({Role.VIEWER}), About.NOTHING)
LOOKS_AT_A_MODEL = Rule(_ANY, About.MODEL)
COMMANDS = Rule(frozenset({Role.OPERATOR}), About.FLEET)
COMMANDS_ALL = Rule(frozenset({Role.OPERATOR}), About.EVERYTHING)
TAKES_PART = Rule(_MEMBERS, About.FLEET)
TAKES_PART_MUCH = Rule(_MEMBERS, About.FLEET, large=True)
MEETS = Rule(_MEMBERS, About.NOTHING, large=True)

RULES: dict[str, dict[str, Rule]] = {
    "resharder.v1.PublisherService": {
        "CreatePublisher": WRITES_MUCH,
        "RegisterSlot": WRITES_MUCH,
        "GetAssignment": WRITES,
        "RenewLease": WRITES,
        "CreateVersion": WRITES,
        "UploadChunks": WRITES_MUCH,
        "ListMissingChunks": WRITES,
        "SealSlot": WRITES_MUCH,
        "AbortVersion": WRITES,
        "WaitVersion": WRITES,
    },
    "resharder.v1.ServerService": {
        "ClaimServer": SERVES,
        "Attend": SERVES,
        "ReportWorker": SERVES,
        "PutProfile": SERVES_MUCH,
        "GetManifest": READS,
        "DigestBoxes": READS_MUCH,
        "DownloadChunks": READS_MUCH,
        "GetModel": READS,
    },
    "resharder.v1.OperatorService": {
        "GetDaemon": WITH_A_ROLE,  # what it and lists say is narrowed: see answers.py
        "ListVersions": LOOKS_AT_A_MODEL,
        "GetVersion": LOOKS_AT_A_MODEL,
        "ListServers": WITH_A_ROLE,
        "ListFleets": WITH_A_ROLE,
        "ListEvents": LOOKS,
        "ListArchive": LOOKS,
        "ExportVersion": READS,
        "UpdateFleet": COMMANDS,
        "RollBackFleet": COMMANDS,
        "DecideMove": COMMANDS,
        "SetPower": COMMANDS,
        "SetDrained": COMMANDS,
        "ProfileInstall": COMMANDS,
        "VerifyServer": COMMANDS,
        "RetireVersions": COMMANDS_ALL,
        "ArchiveVersion": COMMANDS_ALL,
        "RestoreVersion": COMMANDS_ALL,
    },
    # A group's name is a secret that the daemon tells its members alone.
    "resharder.v1.DirectService": {
        "DeclareMemory": TAKES_PART_MUCH,
        "OfferVersion": TAKES_PART,
        "JoinTransfer": TAKES_PART,
        "StartTransfer": TAKES_PART,
        "FinishTransfer": TAKES_PART,
        "PutDigests": TAKES_PART_MUCH,
        "GetDigests": TAKES_PART,
        "SetGroupKey": MEETS,
        "GetGroupKey": MEETS,
    },
    "grpc.health.v1.Health": {"Check": EVERYBODY, "Watch": EVERYBODY, "List": EVERYBODY},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": WITH_A_ROLE},
}


def rule_of(method: str) -> Rule | None:
    """`method`: /package.Service/Method."""
    service, _, name = method.removeprefix("/").rpartition("/")
    return RULES.get(service, {}).get(name)


def lacks_role(grants: Collection[Grant], rule: Rule | None) -> str:
    """Why a caller may not make this call, whatever it is about; empty where it may."""
    if rule is None:
        return "no role has this call: it has no entry among the daemon's rules"
    if not rule.who or any(grant.role in rule.who for grant in grants):
        return ""
    return f"expected a role of {_said(role.value for role in rule.who)}, got {_said(map(str, grants))}"


def decide(grants: Collection[Grant], rule: Rule | None, resource: Resource) -> str:
    """Why a caller with these roles may not make this call about this resource; empty where it may."""
    if refusal := lacks_role(grants, rule):
        return refusal
    assert rule is not None
    having = [grant for grant in grants if grant.role in rule.who]
    if not rule.who or rule.about is About.NOTHING or any(_covers(grant, rule.about, resource) for grant in having):
        return ""
    return f"expected a role for {resource.name or 'everything'}, got {_said(map(str, having))}"


def _covers(grant: Grant, about: About, resource: Resource) -> bool:
    match grant.role:
        case Role.VIEWER:
            return about is About.MODEL
        case Role.PUBLISHER:
            return bool(resource.model) and grant.covers(resource.model)
        case Role.SERVER if about is About.MODEL:
            return any(map(grant.covers, resource.fleets))
        case Role.OPERATOR if about is not About.FLEET or grant.of == ALL:
            return grant.of == ALL
        case Role.SERVER | Role.OPERATOR:
            return bool(resource.fleets) and all(map(grant.covers, resource.fleets))


def _said(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
