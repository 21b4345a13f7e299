"""Choice of the process that sends each box, where several processes have equal boxes."""

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
        hosts: For each tensor, the host all of whose boxes its processes send; -1 where no host holds all of them.
    """

    pieces: Ints
    hosts: Ints


def senders_by_host(
    tensor: Ints, boxes: Ranges, process: Ints, processes: int, sizes: Ints, item_sizes: Ints, hosts: Ints
) -> HostSenders:
    """Return one piece of each distinct box, and the host of each tensor.

    A tensor of which several hosts hold all boxes is sent by one of them, with bytes even over hosts, and its boxes by the
    processes there, with bytes even over these.

    Args:
        tensor: Number of the tensor of each piece.
        boxes: Box of each piece.
        process: Number of the process of each piece, below `processes`.
        processes: Number of processes.
        sizes: Bytes of each tensor.
        item_sizes: Bytes of an element of each tensor.
        hosts: Number of the host of each process, -1 for a process on no known host.
    """
    held = distinct(tensor, boxes)
    host, count = hosts[process], int(hosts.max(initial=-1)) + 1
    known = np.flatnonzero(host >= 0)
    there = np.unique(held.of[known] * count + host[known]) if count else known  # each box once for each host that has it
    there_tensor, there_host = held.tensor[there // max(count, 1)], there % max(count, 1)
    held_boxes = np.bincount(there_tensor * max(count, 1) + there_host, minlength=len(sizes) * max(count, 1))
    whole = held_boxes.reshape(len(sizes), -1) == np.bincount(held.tensor, minlength=len(sizes))[:, None]
    chosen = _hosts(whole & (held_boxes.reshape(len(sizes), -1) > 0), sizes)
    part = np.flatnonzero((chosen[tensor] < 0) | (chosen[tensor] == host))
    volumes = held.boxes.volume * item_sizes[held.tensor]
    return HostSenders(np.sort(choose(held, part, process, processes, np.arange(len(held.tensor)), volumes)), chosen)


def _hosts(whole: npt.NDArray[np.bool_], sizes: Ints) -> Ints:
    """Return a host for each tensor, with bytes even over hosts; -1 without one. `whole[t, h]`: host `h` holds tensor `t`."""
    found = np.full(len(sizes), -1, np.int64)
    load = np.zeros(whole.shape[1], np.int64)
    choices = whole.sum(axis=1)
    for number in np.lexsort((-sizes, choices)).tolist():  # those with fewer choices first, then larger ones
        if choices[number]:
            candidates = np.flatnonzero(whole[number])
            found[number] = host = int(candidates[np.argmin(load[candidates])])
            load[host] += sizes[number]
    return found


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
