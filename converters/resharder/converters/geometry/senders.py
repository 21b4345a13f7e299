"""Choice of the process that sends each box, where several processes have equal boxes."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from resharder.converters.geometry.piece_arrays import Distinct, Ints, Ranges, distinct


def senders(tensor: Ints, boxes: Ranges, process: Ints, processes: int, item_sizes: Ints) -> Ints:
    """Return one piece of each distinct box, with bytes even over the processes that have it.

    Args:
        tensor: Number of the tensor of each piece.
        boxes: Box of each piece.
        process: Number of the process of each piece, below `processes`.
        processes: Number of processes.
        item_sizes: Bytes of an element of each tensor.

    Returns:
        Indices of pieces, ascending.
    """
    held = distinct(tensor, boxes)
    sizes = held.boxes.volume * item_sizes[held.tensor]
    return np.sort(choose(held, np.arange(len(tensor)), process, processes, np.arange(len(held.tensor)), sizes))


class HostSenders(NamedTuple):
    """Senders that prefer one host for a whole tensor.

    Attributes:
        pieces: Indices of pieces, ascending.
        hosts: For each tensor, the host that has all of its boxes in the end; -1 for none.
        gathered: Whether processes of further hosts send some of these boxes, for each tensor.
    """

    pieces: Ints
    hosts: Ints
    gathered: npt.NDArray[np.bool_]


def senders_by_host(
    tensor: Ints,
    boxes: Ranges,
    process: Ints,
    processes: int,
    sizes: Ints,
    item_sizes: Ints,
    hosts: Ints,
    gathering: Collection[int] = (),
) -> HostSenders:
    """Return one piece of each distinct box, and the host of each tensor.

    A tensor of which several hosts hold all boxes is sent by one of them, with bytes even over hosts, and its boxes by the
    processes there, with bytes even over these. A tensor of which no host holds all boxes has the host of `gathering` that holds
    most bytes of it, if hosts of `gathering` hold all boxes together.

    Args:
        tensor: Number of the tensor of each piece.
        boxes: Box of each piece.
        process: Number of the process of each piece, below `processes`.
        processes: Number of processes.
        sizes: Bytes of each tensor.
        item_sizes: Bytes of an element of each tensor.
        hosts: Number of the host of each process, -1 for a process on no known host.
        gathering: Hosts between which boxes can move.
    """
    held = distinct(tensor, boxes)
    volumes = held.boxes.volume * item_sizes[held.tensor]
    host, count = hosts[process], int(hosts.max(initial=0)) + 1
    known = np.flatnonzero(host >= 0)
    there = np.unique(held.of[known] * count + host[known])  # each box once for each host that has it
    chosen, gathered = _hosts(held.tensor, volumes, sizes, there // count, there % count, count, gathering)
    home = chosen[held.tensor]
    at_home = (home >= 0) & np.isin(np.arange(len(home)) * count + home, there)
    others = ~gathered[tensor] | np.isin(host, [*gathering])
    part = np.flatnonzero(np.where(at_home[held.of], host == chosen[tensor], others))
    return HostSenders(np.sort(choose(held, part, process, processes, np.arange(len(held.tensor)), volumes)), chosen, gathered)


def _hosts(
    tensor: Ints, volumes: Ints, sizes: Ints, box: Ints, host: Ints, hosts: int, gathering: Collection[int]
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return a host for each tensor, with bytes even over hosts, -1 without one, and whether it gathers boxes from others.

    Args:
        tensor: Number of the tensor of each distinct box.
        volumes: Bytes of each box.
        sizes: Bytes of each tensor.
        box: Box `box[i]` is on host `host[i]`.
        host: See `box`.
        hosts: Number of hosts.
        gathering: Hosts between which boxes can move.
    """
    held = np.zeros((len(sizes), hosts), np.int64)  # bytes of each tensor on each host
    np.add.at(held, (tensor[box], host), volumes[box])
    movable, moved = np.zeros(len(sizes), np.int64), np.unique(box[np.isin(host, [*gathering])])
    np.add.at(movable, tensor[moved], volumes[moved])
    whole = held == sizes[:, None]
    gathered = (movable == sizes) & ~whole.any(axis=1)
    between = np.where(np.isin(np.arange(hosts), [*gathering]), held, -1)
    candidates = np.where(gathered[:, None], between == between.max(axis=1, keepdims=True), whole)
    found = np.full(len(sizes), -1, np.int64)
    load = np.zeros(hosts, np.int64)
    choices = candidates.sum(axis=1)
    for number in np.lexsort((-sizes, choices)).tolist():  # those with fewer choices first, then larger ones
        if choices[number]:
            some = np.flatnonzero(candidates[number])
            found[number] = chosen = int(some[np.argmin(load[some])])
            load[chosen] += sizes[number]
    return found, gathered


def choose(held: Distinct, part: Ints, process: Ints, processes: int, box: Ints, sizes: Ints) -> Ints:
    """Return the piece that each copy reads: of the pieces of its box in `part`, one of the process with
    the fewest bytes so far.

    Copies with fewer choices come first, then larger ones, so that later copies even out the load.
    """
    order = part[np.lexsort((process[part], held.of[part]))]  # pieces, box by box
    holders = np.bincount(held.of[part], minlength=len(held.tensor))
    begins = np.cumsum(holders) - holders
    load = np.zeros(processes, np.int64)
    chosen = np.empty(len(box), np.int64)
    # Copies of equal size, whose boxes the same processes have, are distributed in one step.
    names = np.random.default_rng(7).integers(2**63, size=processes)
    alike = np.zeros(len(held.tensor), np.int64)
    np.add.at(alike, held.of[part], names[process[part]])
    by_kind = np.lexsort((alike[box], -sizes, holders[box]))
    kinds = np.column_stack([alike[box], sizes, holders[box]])[by_kind]
    for copies in np.split(by_kind, np.flatnonzero((kinds[1:] != kinds[:-1]).any(axis=1)) + 1):
        if len(copies):
            first = box[copies[0]]
            who = process[order[begins[first] : begins[first] + holders[first]]]
            turns = _turns(load[who], int(sizes[copies[0]]), len(copies))
            np.add.at(load, who[turns], sizes[copies])
            chosen[copies] = order[begins[box[copies]] + turns]
    return chosen


def _turns(load: Ints, size: int, items: int) -> Ints:
    """Return the process for each of `items` items of `size` bytes, when the process with the least
    load takes the next item.
    """
    most = int((load.max() - load.min()) // size) + items // len(load) + 2
    after = load[:, None] + size * np.arange(min(items, most))
    turns: Ints = np.argsort(after, axis=None, kind="stable")[:items] // after.shape[1]
    return turns
