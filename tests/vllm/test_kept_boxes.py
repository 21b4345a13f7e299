"""Boxes that are the same in the version before and this one: digested in memory, and copied only if memory has others."""

from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.worker import install
from resharder.client.inference.worker.install import Installed
from resharder.client.inference.worker.routing import Route
from resharder.converters.geometry.layout import Box, Piece, Range, TensorSpec
from resharder.converters.storage.digest import digest

SPEC = TensorSpec("w", "F32", (3, 4))
PIECES = tuple(Piece("w", (Range(row, 1), Range(0, 4)), "weight", 4 * row, (4, 1)) for row in range(3))
Digests = dict[tuple[str, Box], int]


class Reads(Mapping[str, Any]):
    """The tensors of a version, and how often one was read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._bits, self.count = values.numpy().view(np.uint32), 0

    def __getitem__(self, name: str) -> Any:
        self.count += 1
        return self._bits

    def __iter__(self) -> Any:
        return iter(["w"])

    def __len__(self) -> int:
        return 1


def digests_of(values: torch.Tensor) -> Digests:
    bits = values.numpy().view(np.uint32)
    return {("w", piece.box): digest(bits[row : row + 1], piece.box, SPEC.shape) for row, piece in enumerate(PIECES)}


def installed(model: torch.nn.Linear, values: torch.Tensor, before: Digests | None) -> tuple[Installed, int]:
    """Install a version, and return the outcome and the number of boxes that were copied."""
    host: Any = SimpleNamespace(device=torch.device("cpu"), neighbours=1, calling=nullcontext)
    reads = Reads(values)
    source: Any = SimpleNamespace(expected=digests_of(values), arrays=reads, specs={"w": SPEC})
    route, recording = Route(PIECES, frozenset(), frozenset(), (), 48), None
    done = install.install(host, model, None, recording, route, source, before=before)  # type: ignore[arg-type]
    return done, reads.count


def model_of(values: torch.Tensor) -> torch.nn.Linear:
    model = torch.nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(values)
    return model


OLD = torch.arange(12.0).reshape(3, 4)
NEW = OLD.clone()
NEW[1, 2] = 100.0


def test_only_the_boxes_that_differ_are_copied_and_all_are_verified() -> None:
    model = model_of(OLD)
    done, copied = installed(model, NEW, digests_of(OLD))
    assert (copied, done.verified, done.boxed_bytes, done.kept_bytes) == (1, 3, 48, 32)
    assert torch.equal(model.weight, NEW)


@pytest.mark.parametrize("row", range(3))
def test_a_box_that_memory_does_not_have_any_more_is_copied_again(row: int) -> None:
    model = model_of(OLD)
    with torch.no_grad():
        model.weight[row, 0] = -7.0
    done, copied = installed(model, NEW, digests_of(OLD))
    assert (copied, done.verified, done.kept_bytes) == ((1, 3, 32) if row == 1 else (2, 3, 16))
    assert torch.equal(model.weight, NEW)


@pytest.mark.parametrize("before", [None, {}])
def test_without_digests_of_the_version_before_all_are_copied(before: Digests | None) -> None:
    model = model_of(NEW)
    done, copied = installed(model, NEW, before)
    assert (copied, done.verified, done.kept_bytes) == (3, 3, 0)


def test_a_fault_is_found_in_a_box_that_would_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARDER_FAULT", "misplace:w")
    with pytest.raises(InstallError, match="3 boxes differ from the store's digests"):
        installed(model_of(OLD), OLD, digests_of(OLD))
