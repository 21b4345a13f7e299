"""Peer memory on GPUs: what can be shared, that released memory is free, and that a reader outlives a rank."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from resharder.client.direct.base import DirectFailed, JoinedGroup
from resharder.client.direct.peer_memory.meeting import meet
from resharder.client.direct.transfer import Transfer
from resharder.client.gpu.schedule import schedule
from resharder.converters.geometry.copy_table import ALIGN, Copies, copies_of
from resharder.converters.geometry.layout import Layout
from resharder.converters.geometry.plan import plan
from torch.distributed import TCPStore

from benchmarks.direct_layouts import DENSE, written_trainer, written_workers
from tests.client.direct_ranks import filled, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
LONG, MIB = 60.0, 1 << 20
CONTEXT = multiprocessing.get_context("spawn")
BIG = DENSE | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 65536}


def sides() -> tuple[Copies, Layout, Layout]:
    (rank,), (worker,) = written_trainer(BIG, 1).values(), written_workers(BIG, 1).values()
    return copies_of(plan({0: rank}, {1: worker})), rank, worker


def on(device: torch.device, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class Side:
    """One of two processes: rank 0 has the memory, rank 1 reads it."""

    def __init__(self, rank: int, port: int, device: int) -> None:
        self.rank, self.device = rank, torch.device("cuda", device)
        torch.cuda.set_device(self.device)
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG))
        copies, *layouts = sides()
        self.layout = layouts[rank]
        self.tensors = on(self.device, filled(self.layout, 1 if rank == 0 else None))
        sources = self.tensors if rank == 0 else {}
        self.pairs = meet(self.store, rank, copies, self.device, sources, LONG)
        assert not len(self.pairs.rest(copies))
        self.transfer = Transfer(schedule(self.pairs.rest(copies), rank, ALIGN), JoinedGroup(rank), self.device, None, self.pairs)

    def run(self, seconds: float = LONG) -> None:
        self.transfer.prepare(*((self.tensors, {}) if self.rank == 0 else ({}, self.tensors)))
        self.transfer.run(seconds)

    def holds(self, version: int) -> bool:
        wanted = filled(self.layout, version)
        return all(same(self.tensors[name].cpu(), wanted[name]) for name in wanted)

    def meet(self, where: str) -> None:
        self.store.set(f"{where} {self.rank}", "here")
        self.store.wait([f"{where} {1 - self.rank}"], timedelta(seconds=LONG))


def versions(side: Side) -> dict[str, Any]:
    """Version after version: in the same memory, and in other memory."""
    results = {}
    for version in (1, 2, 3):
        if side.rank == 0 and version == 2:
            for name, tensor in on(side.device, filled(side.layout, 2)).items():
                side.tensors[name].copy_(tensor)
            torch.cuda.synchronize()
        if side.rank == 0 and version == 3:
            side.tensors = on(side.device, filled(side.layout, 3))
        side.run()
        results[f"version {version}"] = side.rank == 0 or side.holds(version)
    return results


def freed(side: Side) -> dict[str, Any]:
    """Memory that the rank frees after `release` is free on the GPU; then it shares other memory."""
    side.run()
    side.meet("mapped")
    results = {}
    if side.rank == 0:
        size = sum(tensor.numel() * tensor.element_size() for tensor in side.tensors.values())
        before = torch.cuda.mem_get_info(side.device)[0]
        side.transfer.release(LONG)
        side.tensors = {}
        side.transfer._sources = {}
        for owner in side.pairs.owners.values():
            owner._sources = {}
        torch.cuda.empty_cache()
        results["freed"] = (torch.cuda.mem_get_info(side.device)[0] - before) / size
        side.tensors = on(side.device, filled(side.layout, 2))
    side.meet("freed")
    side.run()
    results["again"] = side.rank == 0 or side.holds(2)
    return results


def killed(side: Side) -> dict[str, Any]:
    """The rank dies while the reader copies, 200 times over."""
    side.run()
    side.meet("warm")
    if side.rank == 0:
        side.pairs.owners[1].go()
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
    reader = side.pairs.readers[0]

    def read() -> None:
        with reader.reading(side.tensors, time.monotonic() + LONG, lambda: None):
            end = time.monotonic() + 1.0
            while time.monotonic() < end:
                for number in range(reader.rounds):
                    reader.run(number)
                torch.cuda.synchronize()

    with pytest.raises(DirectFailed):
        read()
    return {"alive": float(torch.ones(8, device=side.device).sum()) == 8, "whole": side.holds(1)}


def process(act: Callable[[Side], dict[str, Any]], rank: int, port: int, device: int, expandable: bool, answers: Any) -> None:
    if expandable:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    side = Side(rank, port, device)
    answers.put((rank, act(side)))
    side.meet("end")


@contextmanager
def two(act: Callable[[Side], dict[str, Any]], device: int, expandable: bool = False) -> Iterator[Any]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = CONTEXT.Queue()
    started = [
        CONTEXT.Process(target=process, args=(act, rank, store.port, device * rank, expandable, answers), daemon=True)
        for rank in range(2)
    ]
    for each in started:
        each.start()
    try:
        yield answers
    finally:
        for each in started:
            each.kill()
            each.join()


DEVICES = [0, pytest.param(1, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"))]


@pytest.mark.parametrize("expandable", [False, True], ids=["cudaMalloc", "expandable"])
@pytest.mark.parametrize("device", DEVICES)
def test_versions_are_read_from_a_ranks_memory_wherever_it_is(device: int, expandable: bool) -> None:
    with two(versions, device, expandable) as answers:
        for _, results in (answers.get(timeout=LONG), answers.get(timeout=LONG)):
            assert results == {f"version {version}": True for version in (1, 2, 3)}


@pytest.mark.parametrize("expandable", [False, True], ids=["cudaMalloc", "expandable"])
def test_memory_that_is_released_is_free_for_other_processes(expandable: bool) -> None:
    with two(freed, 0, expandable) as answers:
        results = dict((answers.get(timeout=LONG), answers.get(timeout=LONG)))
        print(results)
        assert results[1] == {"again": True}
        assert results[0]["freed"] > 0.9
        assert results[0]["again"]


def test_a_reader_outlives_a_rank_that_dies_while_it_reads() -> None:
    with two(killed, 0) as answers:
        rank, results = answers.get(timeout=LONG)
        assert (rank, results) == (1, {"alive": True, "whole": True})
