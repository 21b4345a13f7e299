"""One transfer over peer memory and NCCL: a rank, a worker on its GPU, and a worker on the next one."""

import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from resharder.client.direct.base import DirectFailed, DirectGroup, JoinedGroup
from resharder.client.direct.peer_memory.meeting import meet
from resharder.client.direct.rendezvous import connect, make_group
from resharder.client.direct.transfer import Transfer
from resharder.client.gpu.schedule import quota_of, schedule
from resharder.converters.geometry.copy_table import copies_of
from resharder.converters.geometry.plan import plan
from torch.distributed import TCPStore

from benchmarks.direct_layouts import DENSE, written_trainer, written_workers
from tests.client.direct_ranks import filled, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
LONG = 30.0
STAGING = 16 << 20
CONTEXT = multiprocessing.get_context("spawn")
BIG = DENSE | {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 65536}
Gpus = tuple[int, int, int]
"""GPU of the rank, and of each of its workers."""


def transfer(rank: int, port: int, gpus: Gpus, saver: bool) -> dict[str, Any]:
    """Run three versions as member `rank`; with `saver`, the rank's memory is that of `torch_memory_saver`."""
    device = torch.device("cuda", gpus[rank])
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG))
    (source,), targets = written_trainer(BIG, 1).values(), written_workers(BIG, 2).values()
    whole = copies_of(plan({0: source}, dict(enumerate(targets, 1))))
    layout, copies = [source, *targets][rank], whole.of(rank)
    with ExitStack() as stack:
        stack.enter_context(saved_region() if saver and rank == 0 else nullcontext())
        mine = {name: tensor.to(device) for name, tensor in filled(layout, 1 if rank == 0 else None).items()}
    pairs = meet(store, rank, copies, device, mine if rank == 0 else {}, LONG)
    rest = pairs.rest(copies)
    peers = {*rest.source.tolist(), *rest.target.tolist()} - {rank}
    group: DirectGroup = JoinedGroup(rank)
    if peers:
        group = make_group(store, "mixed", rank, 3, device, LONG, peers)
        connect(group, device, *((sorted(peers), []) if rank == 0 else ([], sorted(peers))), LONG)
    quota = quota_of(whole.most_peers, whole.most_made, STAGING * whole.most_peers)
    moving = Transfer(schedule(rest, rank, quota), group, device, None, pairs)
    equal = []
    for version in (1, 2, 3):
        wanted = filled(layout, version)
        if rank == 0:
            for name, tensor in wanted.items():
                mine[name].copy_(tensor)
            torch.cuda.synchronize()
        moving.prepare(*((mine, {}) if rank == 0 else ({}, mine)))
        moving.run(LONG)
        equal.append(all(same(mine[name].cpu(), wanted[name]) for name in wanted))
    path = moving.path
    store.set(f"done {rank}", "yes")
    store.wait([f"done {other}" for other in range(3)], timedelta(seconds=LONG))
    moving.close()
    return {"path": path, "equal": equal}


def saved_region() -> Any:
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver.region()


def member(rank: int, port: int, gpus: Gpus, saver: bool, answers: Any) -> None:
    try:
        answers.put((rank, transfer(rank, port, gpus, saver)))
    except DirectFailed as error:
        answers.put((rank, {"failed": str(error)}))


@contextmanager
def members(gpus: Gpus = (0, 0, 1), saver: bool = False, off: int | None = None) -> Iterator[dict[int, dict[str, Any]]]:
    """Yield what each member reports; member `off` shares no memory."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers, started = CONTEXT.Queue(), []
    for rank in range(3):
        with pytest.MonkeyPatch.context() as environment, ExitStack() as stack:
            environment.setenv("RESHARDER_PEER_MEMORY", "off" if rank == off else "on")
            if saver and rank == 0:
                stack.enter_context(pytest.importorskip("torch_memory_saver").configure_subprocess())
            process = CONTEXT.Process(target=member, args=(rank, store.port, gpus, saver, answers), daemon=True)
            process.start()
            started.append(process)
    try:
        yield dict(answers.get(timeout=4 * LONG) for _ in started)
    finally:
        for process in started:
            process.kill()
            process.join()


def test_a_rank_sends_to_one_worker_from_its_memory_and_to_another_over_nccl() -> None:
    with members(off=2) as reported:
        assert [reported[rank]["path"] for rank in range(3)] == ["peer-memory+nccl", "peer-memory", "nccl"]
        assert [reported[rank]["equal"] for rank in (1, 2)] == [[True] * 3, [True] * 3]


def test_both_workers_read_a_ranks_memory_without_nccl() -> None:
    with members() as reported:
        assert [reported[rank]["path"] for rank in range(3)] == ["peer-memory"] * 3
        assert [reported[rank]["equal"] for rank in (1, 2)] == [[True] * 3, [True] * 3]


def test_memory_that_its_allocator_made_unshareable_goes_over_nccl_to_other_gpus() -> None:
    """`torch_memory_saver` 0.0.10 takes memory by cuMemCreate without a type of handle that can be exported."""
    with members((0, 1, 1), saver=True) as reported:
        assert [reported[rank]["path"] for rank in range(3)] == ["nccl"] * 3
        assert [reported[rank]["equal"] for rank in (1, 2)] == [[True] * 3, [True] * 3]


def test_memory_that_its_allocator_made_unshareable_is_named_where_nccl_cannot_take_over() -> None:
    """The other members wait for the failed one until their bound."""
    with members(saver=True) as reported:
        assert "other processes cannot map an allocation of" in reported[0]["failed"]
        assert "is on the same GPU, where NCCL cannot be used" in reported[1]["failed"]
