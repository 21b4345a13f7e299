"""Names of `resharder.client` that have become others, with a DeprecationWarning. Each works for one release."""

import warnings
from functools import reduce
from importlib import import_module
from typing import Any

RENAMED = {
    "CollectedVersions": "RetireVersionsResponse",
    "DaemonEvent": "Event",
    "DaemonStatus": "Daemon",
    "FleetStatus": "Fleet",
    "InstallPhase": "Install.State",
    "InstallStatus": "Install",
    "MovePhase": "Move.State",
    "MoveStatus": "Move",
    "PhaseTiming": "Timing",
    "PublisherState": "PublisherStatus.State",
    "RefusedVersion": "Refusal",
    "RequestHandling": "PauseMode",
    "ServerPower": "Power",
    "ServerState": "Server.State",
    "ServerStatus": "Server",
    "SlotState": "Slot.State",
    "SlotStatus": "Slot",
    "StoreNonce": "StoreAccess",
    "StrategyKind": "UpdateStrategy.Kind",
    "TargetKind": "VersionTarget.Kind",
    "VersionState": "Version.State",
    "VersionStatus": "Version",
    "WorkerProfile": "Profile",
    "WorkerReport": "Worker.State",
    "WorkerStatus": "Worker",
}


def warn_renamed(old: str, new: str) -> None:
    """Warn, at the line that uses it, of an argument or field that has another name now."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


def renamed(name: str) -> Any:
    """Return what has had a name of `RENAMED`, and warn at the line that uses it."""
    now = RENAMED[name]
    warnings.warn(f"resharder.client.{name} is now resharder.client.{now}", DeprecationWarning, stacklevel=3)
    return reduce(getattr, now.split("."), import_module("resharder.client.operator.answers"))
