"""The weight-sync systems that `benchmarks.compare` knows."""

from benchmarks.systems.base import Absent, System, TransferAlone
from benchmarks.systems.checkpoint_engine import CheckpointEngine
from benchmarks.systems.nccl_m2n import NcclM2n
from benchmarks.systems.ours import Resharder
from benchmarks.systems.vllm_reload import VllmReload
from benchmarks.systems.vllm_transfer import VllmTransfer

IF_NAMED = frozenset({"resharder-staged"})
"""Systems that run only if they are named."""
SYSTEMS: dict[str, System | TransferAlone] = {
    system.name: system
    for system in (
        Resharder(),
        Resharder("resharder-staged", direct_wait=0),
        VllmReload(),
        VllmTransfer("nccl"),
        VllmTransfer("ipc"),
        VllmTransfer("nccl_m2n"),
        NcclM2n(),
        CheckpointEngine(),
        Absent("modelexpress", "needs modelexpress_server, a Rust service with Redis, of which there is no wheel"),
    )
}
