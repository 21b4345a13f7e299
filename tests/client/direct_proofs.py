"""A proof beside a transfer against the host's digests, both sides in one process:
`TRITON_INTERPRET=1 python -m tests.client.direct_proofs`."""

import threading

import numpy as np
import torch
from resharder.client.direct.group import make_group
from resharder.client.direct.proof import Proof
from resharder.client.direct.schedule import quota_of, schedule
from resharder.client.direct.tiles import TILE
from resharder.client.direct.transfer import Transfer
from resharder.converters.copies import ALIGN, copies_of
from resharder.converters.layout import Layout
from resharder.converters.plan import plan
from resharder.converters.replicas import held_digests
from torch.distributed import HashStore

from benchmarks.direct_layouts import DENSE, memory_of, written_trainer, written_workers

SMALL = DENSE | {"vocab_size": 64, "hidden_size": 512, "num_hidden_layers": 1, "intermediate_size": 64, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2}
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def memory(layout: Layout, version: int) -> Tensors:
    found = {}
    for name, (elements, dtype) in memory_of(layout).items():
        generator = torch.Generator().manual_seed(version)
        found[name] = torch.randint(-(2**15), 2**15, (elements,), dtype=torch.int16, generator=generator).view(dtype)
    return found


def run(transfer: Transfer, sources: Tensors, targets: Tensors, proof: Proof | None) -> None:
    transfer.prepare(sources, targets)
    transfer.run(120, proof)


def main() -> None:
    np.seterr(over="ignore")
    have, want = written_trainer(SMALL, 1), written_workers(SMALL, 1)
    (ranks,), (worker,) = have.values(), want.values()
    copies, store = copies_of(plan(have, want)), HashStore()
    quota = quota_of(copies.most_peers, copies.most_made, 4 * (TILE + ALIGN))  # the least
    groups: dict[int, object] = {}

    def meet(rank: int) -> None:
        groups[rank] = make_group(store, "proofs", rank, 2, CPU, 120)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sender, receiver = (Transfer(schedule(copies, r, quota, 1 << 62), groups[r], CPU) for r in (0, 1))  # type: ignore[arg-type]
    whole_after = receiver.schedule.whole_after
    assert len({*whole_after.values()}) > 1, "some are to be proven while others arrive"
    mine = memory(worker, 0)
    proof = Proof(worker, mine, CPU, whole_after)
    sending = threading.Thread(target=run, args=(sender, memory(ranks, 1), {}, None))
    sending.start()
    run(receiver, {}, mine, proof)
    sending.join()
    assert proof.said() == [held.digest for held in held_digests(worker, mine)]


if __name__ == "__main__":
    main()
