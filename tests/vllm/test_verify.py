"""The verification of a small module that needs no engine."""

from collections.abc import Callable

import pytest
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.recording import inventory
from resharder.client.inference.recording.recorder import Local, Recording
from resharder.client.inference.worker.model_part import MODEL, ModelPart
from resharder.client.inference.worker.routing import Route
from resharder.client.inference.worker.verify import Verifier
from resharder.converters.geometry.layout import Layout, Piece, TensorSpec, full_box
from resharder.converters.storage.digest import digest_torch
from resharder.v1 import resources_pb2

from tests.support.observing import wait_until

Verification = resources_pb2.Verification
SHAPE = (6, 8)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(SHAPE), requires_grad=False)
        self.loaded = torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("table", torch.arange(12.0))


class Scene:
    """`weight` is boxed, `loaded` goes through its loader, and no install writes `table`."""

    def __init__(self) -> None:
        self.model = Model()
        inventory.before_loading(self.model)
        inventory.after_loading(self.model)
        specs = {"w": TensorSpec("w", "F32", SHAPE), "l": TensorSpec("l", "F32", (4, 4))}
        piece = Piece("w", full_box(SHAPE), "weight", 0, (8, 1))
        other = Piece("l", full_box((4, 4)), "loaded.weight", 0, (4, 1))
        locals_ = {
            "weight": Local(SHAPE, (8, 1), torch.float32, frozenset([""])),
            "loaded.weight": Local((4, 4), (4, 1), torch.float32, frozenset(["loaded"])),
        }
        reads = {"w": frozenset(["weight"]), "l": frozenset(["loaded.weight"])}
        part = ModelPart(MODEL, None)
        part.recording = Recording(Layout(specs, (piece, other)), locals_, reads, {}, frozenset())
        part.route = Route((piece,), frozenset(["l"]), frozenset(["loaded"]), ())
        self.part, self.why = part, ""
        self.altered: list[Verification] = []
        self.verifications: list[Verification] = []
        self.verifier = Verifier(
            {MODEL: part}, torch.device("cpu"), 1, lambda: 3, lambda: self.why, self.altered.append, self.verifications.append
        )

    def install(self) -> None:
        box = full_box(SHAPE)
        with self.verifier.exclusive():
            self.verifier.expect(self.part, {("w", box): digest_torch(self.model.weight.detach(), box, SHAPE)})
            self.verifier.installed({MODEL: self.model})

    def verify(self) -> Verification:
        return self.verifier.verify({MODEL: self.model})


@pytest.fixture
def scene() -> Scene:
    made = Scene()
    made.install()
    return made


def test_memory_as_it_was_installed_is_verified_in_full(scene: Scene) -> None:
    found = scene.verify()
    assert (found.skipped, found.different_tensors, found.tensors, found.version, found.rank) == ("", 0, 3, 3, 1)
    assert found.covered_bytes == found.total_bytes == 4 * (6 * 8 + 4 * 4)
    assert found.digested_bytes == 4 * 6 * 8, "what went through a loader is compared with what the install left"
    assert not found.uncompared
    assert (scene.verifications, scene.altered) == ([found], [])


def test_what_was_not_compared_is_counted_with_the_reason(scene: Scene) -> None:
    with scene.verifier.exclusive():
        scene.model.loaded.weight.data = torch.empty(0)  # as vLLM's CPU build does when it packs a weight
        scene.verifier.expect(scene.part, None)
        scene.verifier.installed({MODEL: scene.model})
    found = scene.verify()
    assert (found.skipped, found.covered_bytes, found.digested_bytes, found.total_bytes) == ("", 0, 0, 4 * (6 * 8 + 4 * 4))
    why = {one.reason: (one.tensors, one.bytes, list(one.names)) for one in found.uncompared}
    assert why == {
        "the version is served ahead of READY, and the store's digests are not known yet": (1, 4 * 6 * 8, ["w"]),
        "the engine has packed them into memory of a kernel, which cannot be read": (1, 4 * 4 * 4, ["l"]),
    }


def test_a_part_of_a_parameter_that_no_box_covers_is_not_taken_for_compared(scene: Scene) -> None:
    """One tensor fills half of `weight` by a box, another one the rest with a cast."""
    half = TensorSpec("w", "F32", (3, 8))
    known, piece = scene.part.known, Piece("w", full_box((3, 8)), "weight", 0, (8, 1))
    specs = known.layout.tensors | {"w": half, "cast": TensorSpec("cast", "BF16", (3, 8))}
    reads = known.reads | {"cast": frozenset(["weight"])}
    scene.part.recording = Recording(Layout(specs, (piece, *known.layout.pieces[1:])), known.locals, reads, {"cast": "a cast"})
    scene.part.route = Route((), frozenset(specs), frozenset(["", "loaded"]), (piece,))
    digest = digest_torch(scene.model.weight.detach()[:3], full_box((3, 8)), (3, 8))
    with scene.verifier.exclusive():
        scene.verifier.expect(scene.part, {("w", full_box((3, 8))): digest})
        scene.verifier.installed({MODEL: scene.model})
    found = scene.verify()
    assert (found.covered_bytes, found.digested_bytes) == (found.total_bytes, 4 * 3 * 8)
    scene.model.weight.detach()[4].zero_()
    assert list(scene.verify().different) == ["weight"]


def test_a_model_whose_loader_cannot_be_recorded_is_not_said_to_be_compared(scene: Scene) -> None:
    specs = scene.part.known.layout.tensors
    scene.part.recording = Recording(Layout(specs, ()), scene.part.known.locals, {}, {"": "it reads values"})
    scene.part.route = Route((), frozenset(specs), frozenset([""]), ())
    scene.install()
    found = scene.verify()
    assert (found.covered_bytes, found.total_bytes) == (0, 4 * (6 * 8 + 4 * 4))
    assert [(one.reason, one.tensors) for one in found.uncompared] == [
        ("where the model's loader puts them could not be recorded", 2)
    ]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("weight", lambda model: model.weight[2, 3].add_(1)),
        ("loaded.weight", lambda model: model.loaded.weight.detach()[0].zero_()),
        ("table", lambda model: model.table.zero_()),
        ("weight", lambda model: setattr(model, "weight", torch.nn.Parameter(torch.zeros(2, 2)))),
    ],
)
def test_a_change_anywhere_is_found_by_its_name(scene: Scene, path: str, change: Callable[[Model], object]) -> None:
    with torch.no_grad():
        change(scene.model)
    found = scene.verify()
    assert list(found.different) == [path]
    assert scene.altered == [found]


def test_the_digests_of_the_store_are_compared_and_not_those_of_what_was_there(scene: Scene) -> None:
    with scene.verifier.exclusive():
        scene.verifier.expect(scene.part, {("w", full_box(SHAPE)): 1})
        scene.verifier.installed({MODEL: scene.model})
    assert list(scene.verify().different) == ["weight"]


def test_an_install_brings_back_what_it_writes_and_does_not_hide_what_it_does_not(scene: Scene) -> None:
    scene.model.loaded.weight.detach()[0].zero_()
    assert scene.verify().different_tensors == 1
    scene.install()
    assert scene.verify().different_tensors == 0
    scene.model.table.zero_()
    scene.install()
    assert list(scene.verify().different) == ["table"], "an install in between hid it"
    with pytest.raises(InstallError, match=r"\(table\): restart the server"):
        scene.install()


def test_what_cannot_be_verified_is_skipped_with_the_reason(scene: Scene) -> None:
    scene.why = "not verifiable while asleep (level 1)"
    found = scene.verify()
    assert (found.skipped, found.tensors) == (scene.why, 0)
    scene.why = ""
    assert "no baseline yet" in Scene().verify().skipped


def test_an_install_that_comes_meanwhile_ends_the_verification(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = inventory.slices

    def slices(*args: object) -> object:
        with scene.verifier.exclusive():
            pass
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(inventory, "slices", slices)
    assert "interrupted by an install" in scene.verify().skipped
    assert scene.altered == []


def test_verifications_come_by_themselves_and_on_request(scene: Scene) -> None:
    scene.verifier.start({MODEL: scene.model}, 0.05)
    wait_until(lambda: len(scene.verifications) > 1)
    scene.verifier.request("r1")
    wait_until(lambda: any(found.request == "r1" for found in scene.verifications))
