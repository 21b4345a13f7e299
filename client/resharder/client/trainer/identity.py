"""Rank and job of this process, from arguments, torch.distributed, the environment, or as a single rank."""

import secrets
from dataclasses import dataclass, field

from resharder.client.errors import UsageError
from resharder.client.settings import JOB, RANK, WORLD_SIZE


@dataclass(frozen=True)
class RankIdentity:
    """Rank of a job. `process` is a nonce that distinguishes the processes of one rank."""

    job: str
    rank: int
    world_size: int
    process: str = field(default_factory=lambda: secrets.token_hex(16))  # new for each `connect`
    skipped: bool = False  # the target `latest` skips the job's versions
    together: tuple[str, ...] = ()  # models whose versions of a step are READY together; empty for one model


def identify(job: str | None, rank: int | None, world_size: int | None) -> RankIdentity:
    """Return this process's identity.

    With torch.distributed initialised and no `job`, rank 0 broadcasts a random id, the only collective. Raises UsageError if
    rank, world size or job cannot be determined.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(f"expected rank and world_size together, got rank={rank}, world_size={world_size}")
    job = job or JOB.text()
    if rank is None or world_size is None:
        rank, world_size = _place()
    if not 0 <= rank < world_size:
        raise UsageError(f"expected 0 <= rank < world_size, got rank={rank}, world_size={world_size}")
    return RankIdentity(job or _random_job(world_size), rank, world_size)


def _place() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    given = RANK.text(), WORLD_SIZE.text()
    if given == ("", ""):
        return 0, 1
    if not all(value.isdigit() for value in given):
        raise UsageError(
            f"expected RANK and WORLD_SIZE in the environment, got RANK={given[0] or None}, WORLD_SIZE={given[1] or None}"
        )
    return int(given[0]), int(given[1])


def _random_job(world_size: int) -> str:
    mine = secrets.token_bytes(16)
    if world_size == 1:
        return mine.hex()
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() == world_size):
        raise UsageError(
            f"the {world_size} ranks have no job id in common, and torch.distributed cannot broadcast one: pass job=… or set "
            f"RESHARDER_JOB, or connect after init_process_group"
        )
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in str(dist.get_backend()) else torch.device("cpu")
    shared = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    dist.broadcast(shared, src=0)
    return bytes(shared.cpu().tolist()).hex()
