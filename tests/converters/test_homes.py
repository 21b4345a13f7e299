"""Tensors of one host stay together: the host that sends each tensor, its senders, and the files of each home."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.geometry.layout import Range, TensorSpec
from resharder.converters.geometry.piece_arrays import pack_boxes
from resharder.converters.geometry.senders import senders_by_host
from resharder.converters.storage.files import lay_out

Parts = list[list[frozenset[int]]]
"""For each tensor, for each of its boxes, the processes that hold it."""
HOSTS = np.array([-1, 0, 0, 1, 1, 2, 2, 2], np.int64)  # of eight processes
ROWS = 6


@st.composite
def parts(draw: st.DrawFn) -> Parts:
    holders = st.frozensets(st.integers(0, len(HOSTS) - 1), min_size=1, max_size=6)
    return draw(st.lists(st.lists(holders, min_size=1, max_size=4), min_size=1, max_size=12))


@given(parts(), st.frozensets(st.integers(0, 2)))
def test_a_host_that_holds_a_whole_tensor_sends_all_of_it(parts: Parts, gathering: frozenset[int]) -> None:
    pieces = [(tensor, box, process) for tensor, boxes in enumerate(parts) for box, held in enumerate(boxes) for process in held]
    tensor, box, process = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    packed = pack_boxes([(Range(b * ROWS, ROWS), Range(0, t + 1)) for t, b, _ in pieces])
    sizes = np.array([len(boxes) * ROWS * (number + 1) * 2 for number, boxes in enumerate(parts)])
    found = senders_by_host(tensor, packed, process, len(HOSTS), sizes, np.full(len(parts), 2), HOSTS, gathering)
    assert np.all(np.diff(found.pieces) > 0)
    sent = sorted(zip(tensor[found.pieces].tolist(), box[found.pieces].tolist(), strict=True))
    assert sent == [(t, b) for t, boxes in enumerate(parts) for b in range(len(boxes))], "each box once"
    for number, boxes in enumerate(parts):
        whole = set.intersection(*({int(HOSTS[each]) for each in held} - {-1} for held in boxes))
        of_it = HOSTS[process[found.pieces[tensor[found.pieces] == number]]]
        home, among = int(found.hosts[number]), [{int(HOSTS[each]) for each in held} & gathering for held in boxes]
        assert bool(found.gathered[number]) == (not whole and all(among))
        if found.gathered[number]:
            held_there = {host: sum(host in each for each in among) for host in gathering}
            assert held_there[home] == max(held_there.values()), "a host that needs the fewest bytes"
            assert set(of_it.tolist()) <= gathering
            assert of_it.tolist().count(home) == held_there[home], "which sends what it has itself"
        else:
            assert home in (whole or {-1})
            assert not whole or set(of_it.tolist()) == {home}


def test_bytes_are_even_over_hosts_and_their_processes() -> None:
    tensors = 60
    process = np.tile(np.arange(1, 7), tensors)  # two hosts of two, and two of the three on the last one
    tensor = np.repeat(np.arange(tensors), 6)
    packed = pack_boxes([(Range(0, 8), Range(0, 4))] * len(tensor))
    found = senders_by_host(tensor, packed, process, 8, np.full(tensors, 64), np.full(tensors, 2), HOSTS)
    assert np.bincount(process[found.pieces], minlength=8).tolist() == [0, 10, 10, 10, 10, 10, 10, 0]
    assert np.bincount(found.hosts).tolist() == [20, 20, 20]


def test_tensors_of_which_two_hosts_hold_halves_have_both_as_their_hosts_in_turn() -> None:
    tensors = 10
    tensor, process = np.repeat(np.arange(tensors), 2), np.tile([1, 3], tensors)
    packed = pack_boxes([(Range(8 * (p // 3), 8), Range(0, 4)) for p in process.tolist()])
    sizes = np.full(tensors, 128)
    found = senders_by_host(tensor, packed, process, 8, sizes, np.full(tensors, 2), HOSTS, {0, 1})
    assert np.bincount(found.hosts).tolist() == [5, 5]
    assert found.gathered.all()
    apart = senders_by_host(tensor, packed, process, 8, sizes, np.full(tensors, 2), HOSTS, {0})
    assert (set(apart.hosts.tolist()), apart.gathered.any()) == ({-1}, False)


def test_without_known_hosts_every_tensor_is_sent_by_whoever_holds_it() -> None:
    nowhere = np.full(2, -1, np.int64)
    packed = pack_boxes([(Range(0, 8),)] * 2)
    found = senders_by_host(np.array([0, 0]), packed, np.array([0, 1]), 2, np.array([16]), np.array([2]), nowhere)
    assert (found.pieces.tolist(), found.hosts.tolist()) == ([0], [-1])


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from(["BF16", "F32"]), st.integers(1, 40)), min_size=1))
def test_no_file_has_tensors_of_two_homes(rows: list[tuple[str, str, int]]) -> None:
    specs = [TensorSpec(f"t{number}", dtype, (size,)) for number, (_, dtype, size) in enumerate(rows)]
    homes = {f"t{number}": home for number, (home, _, _) in enumerate(rows) if home}
    files = lay_out(specs, 64, homes)
    assert [file.path for file in files] == sorted(file.path for file in files)
    assert sorted(name for file in files for name in file.by_name) == sorted(spec.name for spec in specs)
    of_home: dict[str, list[list[str]]] = defaultdict(list)
    for file in files:
        (home,) = {homes.get(name, "") for name in file.by_name}
        of_home[home].append(list(file.by_name))
    for home, names in of_home.items():
        alone = lay_out([spec for spec in specs if homes.get(spec.name, "") == home], 64)
        assert names == [list(file.by_name) for file in alone], "as if the home had no other tensors"
