"""Public API of Resharder's clients: trainers, operators, and programs with an engine of vLLM or SGLang.

    from resharder.client import connect     # a trainer's publisher
    from resharder.client import fill        # a checkpoint or a version into a trainer's model
    from resharder.client import Operator    # queries, fleets, copies of versions
    from resharder.client import attach      # a vLLM engine in this process; attach_sglang for SGLang's

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
    from resharder.client.inference.sglang.server import (
        attach_sglang,
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
        Daemon,
        Event,
        ExportedVersion,
        Fleet,
        Install,
        Move,
        Node,
        NodeCopy,
        NodeLink,
        PauseMode,
        Power,
        Profile,
        PublisherStatus,
        Refusal,
        ReplicaShortage,
        RetireVersionsResponse,
        ServeAhead,
        Server,
        Slot,
        StoreAccess,
        Timing,
        Uncompared,
        UpdateStrategy,
        Verification,
        Version,
        VersionHome,
        VersionTarget,
        Worker,
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
    from resharder.client.trainer.connect import (
        connect,
    )
    from resharder.client.trainer.fill import (
        Filled,
        fill,
    )
    from resharder.client.trainer.generation import (
        Generation,
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

_MODULES = {
    "errors": (
        "AccessDenied Conflict ConversionError CorruptData DaemonUnreachable GenerationEnded LayoutError "
        "LayoutRejected MessageTooLarge NotFound NotServed OutOfRoom Refused ReplicasDiffer ResharderError "
        "ServersNotAsleep StaleEpoch StaleParameters StoreFailed UnknownTensor UnsupportedModel UsageError VersionAborted "
        "WaitTimeout"
    ),
    "inference.sglang.server": "attach_sglang",
    "inference.vllm.attach": "attach",
    "integrations.megatron_bridge": "PublishCallback",
    "integrations.vllm": "ResharderTrainerInitInfo ShardSource",
    "operator": "Operator",
    "operator.answers": (
        "ArchivedVersion Daemon Event ExportedVersion Fleet Install Move Node NodeCopy "
        "NodeLink PauseMode Power Profile PublisherStatus Refusal ReplicaShortage RetireVersionsResponse ServeAhead "
        "Server Slot StoreAccess Timing Uncompared UpdateStrategy Verification Version VersionHome VersionTarget Worker"
    ),
    "operator.waiting": "FleetListener went_well",
    "rpc.tls": "Tls",
    "tools.import_checkpoint": "import_checkpoint",
    "trainer.connect": "connect",
    "trainer.fill": "Filled fill",
    "trainer.generation": "Generation",
    "trainer.handle": "Handle Progress",
    "trainer.publisher": "Publisher",
    "trainer.rank_layout": "DeclaredTensor",
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "AccessDenied",
    "ArchivedVersion",
    "Conflict",
    "ConversionError",
    "CorruptData",
    "Daemon",
    "DaemonUnreachable",
    "DeclaredTensor",
    "Event",
    "ExportedVersion",
    "Filled",
    "Fleet",
    "FleetListener",
    "Generation",
    "GenerationEnded",
    "Handle",
    "Install",
    "LayoutError",
    "LayoutRejected",
    "MessageTooLarge",
    "Move",
    "Node",
    "NodeCopy",
    "NodeLink",
    "NotFound",
    "NotServed",
    "Operator",
    "OutOfRoom",
    "PauseMode",
    "Power",
    "Profile",
    "Progress",
    "PublishCallback",
    "Publisher",
    "PublisherStatus",
    "Refusal",
    "Refused",
    "ReplicaShortage",
    "ReplicasDiffer",
    "ResharderError",
    "ResharderTrainerInitInfo",
    "RetireVersionsResponse",
    "ServeAhead",
    "Server",
    "ServersNotAsleep",
    "ShardSource",
    "Slot",
    "StaleEpoch",
    "StaleParameters",
    "StoreAccess",
    "StoreFailed",
    "Timing",
    "Tls",
    "Uncompared",
    "UnknownTensor",
    "UnsupportedModel",
    "UpdateStrategy",
    "UsageError",
    "Verification",
    "Version",
    "VersionAborted",
    "VersionHome",
    "VersionTarget",
    "WaitTimeout",
    "Worker",
    "__version__",
    "attach",
    "attach_sglang",
    "connect",
    "fill",
    "import_checkpoint",
    "went_well",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("resharder")
    from resharder.client.deprecated import RENAMED, renamed

    if name in RENAMED:
        return renamed(name)
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from resharder.converters.extras import explained

    with explained("client"):
        found = getattr(import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
