"""A small model for tests of the clients, and how ranks hold it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from resharder.client.cli.versions import named_version
from resharder.client.operator import Operator
from resharder.client.trainer.connect import DeclaredTensor, Handle, connect
from resharder.client.trainer.publisher import Publisher
from safetensors.torch import load_file

CONFIG = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"], "hidden_size": 64}
SHAPES: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "embed": (torch.bfloat16, (1000, 512)),
    "large": (torch.bfloat16, (3000, 1024)),
    "experts": (torch.float16, (6, 40, 96)),
    "norm": (torch.float32, (7,)),
    "odd": (torch.bfloat16, (3,)),
    "bias": (torch.float32, (64,)),
    "scale": (torch.float32, ()),
}
Index = tuple[slice, ...]
Held = tuple[str, Index]


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SHAPES.items()}


def spread(ranks: int) -> list[list[Held]]:
    """Rows, interleaved rows, columns, experts and whole tensors, over the ranks."""
    held: list[list[Held]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        held[rank].append(("embed", (slice(rank, 1000, ranks),)))
        cut = [1024 * r // ranks for r in (rank, rank + 1)]
        held[rank].append(("large", (slice(None), slice(*cut))))
        held[rank] += [("experts", (slice(e, e + 1),)) for e in range(6) if e % ranks == rank]
    for number, name in enumerate(("norm", "odd", "bias", "scale")):
        held[number % ranks].append((name, ()))
    return held


def declared(held: Sequence[Held]) -> list[DeclaredTensor]:
    return [DeclaredTensor(name, SHAPES[name][0], SHAPES[name][1], index) for name, index in held]


def parts(full: dict[str, torch.Tensor], held: Sequence[Held]) -> Iterator[tuple[str, Index, torch.Tensor]]:
    return ((name, index, full[name][index]) for name, index in held)


OPEN: list[Publisher] = []
"""Publishers of `connected`. Those that a test leaves open are closed at its end, so that no lease is renewed in the next one."""


def connected(endpoint: str, ranks: int, job: str, **options: Any) -> list[Publisher]:
    """Publishers of all ranks, attached to their part of the spread."""
    publishers = [
        connect(endpoint, model="policy", job=job, rank=rank, world_size=ranks, config=CONFIG, **options) for rank in range(ranks)
    ]
    OPEN.extend(publishers)
    together(lambda rank: publishers[rank].attach_tensors(declared(spread(ranks)[rank])), ranks)
    return publishers


def publish_all(publishers: Sequence[Publisher], step: int, full: dict[str, torch.Tensor]) -> list[Handle]:
    held = spread(len(publishers))
    return together(lambda rank: publishers[rank].publish_tensors(step, parts(full, held[rank])), len(publishers))


def together(act: Callable[[int], Any], ranks: int) -> list[Any]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(act, range(ranks)))


def exported(endpoint: str, version: str, folder: Path) -> dict[str, torch.Tensor]:
    with Operator(endpoint) as operator:
        found = named_version(operator, version)
        operator.export(found.number, folder, model=found.model)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].view(-1).view(torch.uint8), b[n].contiguous().view(-1).view(torch.uint8))
        for n in a
    )
