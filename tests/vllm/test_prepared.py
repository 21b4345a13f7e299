"""What an install makes of a copy that was made ready before its pause. The copy itself needs a GPU: tests/gpu."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.worker import install
from resharder.client.inference.worker.install import Installed, Prepared
from resharder.client.inference.worker.routing import Route
from resharder.converters.geometry.layout import Piece, Range

PIECES = tuple(Piece("w", (Range(row, 1), Range(0, 4)), "weight", 4 * row, (4, 1)) for row in range(3))
STORED = [11, 22, 33]


class Copy:
    """Finds `digests`."""

    def __init__(self, digests: list[int], pieces: tuple[Piece, ...] = PIECES) -> None:
        self.layout, self.digests, self.ran = SimpleNamespace(pieces=pieces), digests, False

    def is_at(self, tensors: Any) -> bool:
        return set(tensors) == {"weight"}

    def run(self) -> list[int]:
        self.ran = True
        return self.digests


def installed(copy: Copy) -> Installed:
    host: Any = SimpleNamespace(device=torch.device("cpu"), neighbours=1, calling=nullcontext)
    source: Any = SimpleNamespace(expected={("w", piece.box): d for piece, d in zip(PIECES, STORED, strict=True)})
    recording: Any = None
    prepared: Any = Prepared(copy, STORED)  # type: ignore[arg-type]
    route = Route(PIECES, frozenset(), frozenset(), (), 48)
    return install.install(host, torch.nn.Linear(4, 3, bias=False), None, recording, route, source, prepared=prepared)


def test_what_it_finds_is_what_the_store_holds() -> None:
    done = installed(Copy(list(STORED)))
    assert (done.verified, done.boxed_bytes) == (3, 48)


@pytest.mark.parametrize("found", [[11, 22, 34], [22, 11, 33]])
def test_each_box_that_is_another_is_named(found: list[int]) -> None:
    with pytest.raises(InstallError) as error:
        installed(Copy(found))
    wrong = [row for row in range(3) if found[row] != STORED[row]]
    assert f"{len(wrong)} boxes differ from the store's digests" in str(error.value)
    for row in wrong:
        assert f"expected digest {STORED[row]:016x}, found {found[row]:016x}" in str(error.value)


def test_it_is_not_used_for_another_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "write_all", lambda host, live, pieces, source, fault: list(zip(pieces, STORED, strict=True)))
    other = Copy([0, 0, 0], pieces=PIECES[:2])
    assert installed(other).verified == 3
    assert not other.ran
