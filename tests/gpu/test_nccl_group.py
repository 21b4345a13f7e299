"""What needs two GPUs of the direct path's groups: one side lets go while the other does not think of it."""

import multiprocessing
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from resharder.client.direct.base import DirectGroup, PeerMessage
from resharder.client.direct.rendezvous import connect, make_group
from torch.distributed import TCPStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]

LONG, SOON = 60.0, 4.0  # seconds: the latter is less than what a close waits at most
SIZE = 1 << 20


def exchange(group: DirectGroup, rank: int, number: int) -> bool:
    """Whether rank 1 has what rank 0 sent."""
    device, deadline = torch.device("cuda", rank), time.monotonic() + LONG
    wanted = torch.arange(SIZE, device=device).add(number).to(torch.uint8)
    memory = wanted.clone() if rank == 0 else torch.zeros_like(wanted)
    parts = [PeerMessage(1 - rank, memory)]
    group.post(*((parts, []) if rank == 0 else ([], parts)), deadline).wait(deadline)
    return torch.equal(memory, wanted)


def member(rank: int, port: int, answers: Any) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG))
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    results: dict[str, Any] = {}
    for number in range(3):
        group = make_group(store, f"group {number}", rank, 2, device, LONG)
        connect(group, device, *(([1], []) if rank == 0 else ([], [0])), LONG)
        results[f"equal {number}"] = exchange(group, rank, number)
        first = number % 2  # who lets go first: each once, then both at once
        if number < 2 and rank != first:
            store.wait([f"closed {number}"], timedelta(seconds=LONG))
        began = time.monotonic()
        group.close()
        results[f"closed {number}"] = time.monotonic() - began
        if number < 2 and rank == first:
            store.set(f"closed {number}", "yes")
    answers.put(results)


def test_a_side_that_closes_does_not_wait_for_the_other() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    members = [context.Process(target=member, args=(rank, store.port, answers), daemon=True) for rank in range(2)]
    for process in members:
        process.start()
    try:
        for results in (answers.get(timeout=LONG), answers.get(timeout=LONG)):
            print(results)
            assert all(results[f"equal {number}"] for number in range(3))
            assert max(results[f"closed {number}"] for number in range(3)) < SOON
    finally:
        for process in members:
            process.kill()
            process.join()
