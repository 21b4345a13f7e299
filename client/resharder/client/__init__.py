"""Public API of Resharder's clients: trainers, operators, and programs with a vLLM engine.

    from resharder.client import connect     # a trainer's publisher
    from resharder.client import fill        # a checkpoint or a version into a trainer's model
    from resharder.client import Operator    # queries, fleets, copies of versions
    from resharder.client import attach      # a vLLM engine in this process

Conventions: times and timeouts are in seconds, and a timeout of None is no bound; a version is its number, an int, with its
model; errors form one tree (`errors`).

Names are imported on first use: the command line starts fast, workers fork, and a process imports neither torch nor vLLM
unless it needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resharder.client.errors import (
        AccessDenied,
        Conflict,
        ConversionError,
        CorruptData,
        DaemonUnreachable,
        GenerationEnded,
        LayoutError,
        LayoutRejected,
        MessageTooLarge,
        NotFound,
        NotServed,
        OutOfRoom,
        Refused,
        ReplicasDiffer,
        ResharderError,
        ServersNotAsleep,
        StaleEpoch,
        StaleParameters,
        StoreFailed,
        UnknownTensor,
        UnsupportedModel,
        UsageError,
        VersionAborted,
        WaitTimeout,
    )
    from resharder.client.inference.vllm.attach import (
        attach,
    )
    from resharder.client.integrations.megatron_bridge import (
        PublishCallback,
    )
    from resharder.client.integrations.vllm import (
        ResharderTrainerInitInfo,
        ShardSource,
    )
    from resharder.client.operator import (
        Operator,
    )
    from resharder.client.operator.answers import (
        ArchivedVersion,
        CollectedVersions,
        DaemonEvent,
        DaemonStatus,
        ExportedVersion,
        FleetStatus,
        InstallPhase,
        InstallStatus,
        MovePhase,
        MoveStatus,
        PhaseTiming,
        PublisherState,
        PublisherStatus,
        RefusedVersion,
        RequestHandling,
        ServeAhead,
        ServerPower,
        ServerState,
        ServerStatus,
        SlotState,
        SlotStatus,
        StoreNonce,
        StrategyKind,
        TargetKind,
        UpdateStrategy,
        VersionState,
        VersionStatus,
        VersionTarget,
        WorkerProfile,
        WorkerReport,
        WorkerStatus,
    )
    from resharder.client.operator.waiting import (
        FleetListener,
        went_well,
    )
    from resharder.client.rpc.tls import (
        Tls,
    )
    from resharder.client.tools.import_checkpoint import (
        import_checkpoint,
    )
    from resharder.client.trainer.colocate import (
        Generation,
    )
    from resharder.client.trainer.connect import (
        connect,
    )
    from resharder.client.trainer.fill import (
        Filled,
        fill,
    )
    from resharder.client.trainer.handle import (
        Handle,
        Progress,
    )
    from resharder.client.trainer.publisher import (
        Publisher,
    )
    from resharder.client.trainer.rank_layout import (
        DeclaredTensor,
    )

__version__: str

_HOMES = {
    "errors": (
        "AccessDenied Conflict ConversionError CorruptData DaemonUnreachable GenerationEnded LayoutError "
        "LayoutRejected MessageTooLarge NotFound NotServed OutOfRoom Refused ReplicasDiffer ResharderError "
        "ServersNotAsleep StaleEpoch StaleParameters StoreFailed UnknownTensor UnsupportedModel UsageError VersionAborted "
        "WaitTimeout"
    ),
    "inference.vllm.attach": "attach",
    "integrations.megatron_bridge": "PublishCallback",
    "integrations.vllm": "ResharderTrainerInitInfo ShardSource",
    "operator": "Operator",
    "operator.answers": (
        "ArchivedVersion CollectedVersions DaemonEvent DaemonStatus ExportedVersion FleetStatus InstallPhase InstallStatus "
        "MovePhase MoveStatus PhaseTiming PublisherState PublisherStatus RefusedVersion RequestHandling ServeAhead ServerPower "
        "ServerState ServerStatus SlotState SlotStatus StoreNonce StrategyKind TargetKind UpdateStrategy VersionState "
        "VersionStatus VersionTarget WorkerProfile WorkerReport WorkerStatus"
    ),
    "operator.waiting": "FleetListener went_well",
    "rpc.tls": "Tls",
    "tools.import_checkpoint": "import_checkpoint",
    "trainer.colocate": "Generation",
    "trainer.connect": "connect",
    "trainer.fill": "Filled fill",
    "trainer.handle": "Handle Progress",
    "trainer.publisher": "Publisher",
    "trainer.rank_layout": "DeclaredTensor",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "AccessDenied",
    "ArchivedVersion",
    "CollectedVersions",
    "Conflict",
    "ConversionError",
    "CorruptData",
    "DaemonEvent",
    "DaemonStatus",
    "DaemonUnreachable",
    "DeclaredTensor",
    "ExportedVersion",
    "Filled",
    "FleetListener",
    "FleetStatus",
    "Generation",
    "GenerationEnded",
    "Handle",
    "InstallPhase",
    "InstallStatus",
    "LayoutError",
    "LayoutRejected",
    "MessageTooLarge",
    "MovePhase",
    "MoveStatus",
    "NotFound",
    "NotServed",
    "Operator",
    "OutOfRoom",
    "PhaseTiming",
    "Progress",
    "PublishCallback",
    "Publisher",
    "PublisherState",
    "PublisherStatus",
    "Refused",
    "RefusedVersion",
    "ReplicasDiffer",
    "RequestHandling",
    "ResharderError",
    "ResharderTrainerInitInfo",
    "ServeAhead",
    "ServerPower",
    "ServerState",
    "ServerStatus",
    "ServersNotAsleep",
    "ShardSource",
    "SlotState",
    "SlotStatus",
    "StaleEpoch",
    "StaleParameters",
    "StoreFailed",
    "StoreNonce",
    "StrategyKind",
    "TargetKind",
    "Tls",
    "UnknownTensor",
    "UnsupportedModel",
    "UpdateStrategy",
    "UsageError",
    "VersionAborted",
    "VersionState",
    "VersionStatus",
    "VersionTarget",
    "WaitTimeout",
    "WorkerProfile",
    "WorkerReport",
    "WorkerStatus",
    "__version__",
    "attach",
    "connect",
    "fill",
    "import_checkpoint",
    "went_well",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("resharder")
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    except ModuleNotFoundError as error:
        from resharder.converters.extras import explain

        if (line := explain(error, "client")) is None:
            raise
        raise ModuleNotFoundError(line, name=error.name) from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
