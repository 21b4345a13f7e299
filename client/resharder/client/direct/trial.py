"""Trial of a new link: how long a version would take over it, from a part of its bytes between scratch memory.

Servers on other hosts than the ranks take versions directly without being asked to only where that is fast, for they pause
meanwhile. A trial uses the addresses, the network library and the pairs that a version uses.
"""

import time

import torch
from resharder.client.direct.base import DirectFailed, DirectGroup, PeerMessage
from resharder.client.gpu.schedule import Schedule

_BYTES = 256 << 20  # most bytes that a process exchanges
_SCRATCH = 16 << 20
_SECONDS = 2.0  # a trial that takes longer has failed: a version would take as long
_ROOM = 2 << 30  # bytes that stay free on a GPU beside the buffers of packing: NCCL's own buffers take about one


def check_room(device: torch.device, staging: int) -> None:
    """Raise DirectFailed if this process's GPU has no room for a link that nobody has asked for.

    Args:
        device: Device of the tensors.
        staging: Bytes of the buffers for packing.
    """
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < staging + _ROOM:
        raise DirectFailed(
            f"a link needs {(staging + _ROOM) / 1e9:.1f} GB of GPU memory beside the weights, {free / 1e9:.1f} GB are free"
        )


def try_link(group: DirectGroup, found: Schedule, most_peers: int, device: torch.device) -> float:
    """Exchange a part of a version's bytes with every peer, as all of them do now.

    Args:
        group: The link's group.
        found: Rounds of this process.
        most_peers: Largest number of peers of any process, the same on all.
        device: Device of the tensors.

    Returns:
        Seconds that all of a version's bytes would take.

    Raises:
        DirectFailed: A peer is gone, or the link is too slow.
    """
    posts = [(post, into) for each in found.rounds for into, side in enumerate((each.sends, each.receives)) for post in side]
    sizes: dict[tuple[int, int], int] = {}  # by peer and direction, the same on both sides
    for post, into in posts:
        sizes[post.peer, into] = sizes.get((post.peer, into), 0) + post.size
    most = max(1, _BYTES // max(1, most_peers))
    tried = {pair: min(size, most) for pair, size in sizes.items()}
    scratch = torch.empty(min(_SCRATCH, max(tried.values(), default=0)), dtype=torch.uint8, device=device)
    sends, receives = (
        [message for (peer, way), size in tried.items() if way == i for message in _parts(peer, size, scratch)] for i in (0, 1)
    )
    try:
        group.prepare([(sends, receives)])
        began = time.monotonic()
        group.post(sends, receives, began + _SECONDS).wait(began + _SECONDS)
        took = time.monotonic() - began
        group.release()
    except DirectFailed as error:
        raise DirectFailed(f"{sum(tried.values())} bytes did not pass within {_SECONDS:g} s over a new link: {error}") from error
    return max(1e-6, took * sum(sizes.values()) / max(1, sum(tried.values())))


def _parts(peer: int, size: int, scratch: torch.Tensor) -> list[PeerMessage]:
    """Return messages of `size` bytes in all, from or into the same memory."""
    step = max(1, scratch.numel())
    return [PeerMessage(peer, scratch[: min(step, size - at)]) for at in range(0, size, step)]
