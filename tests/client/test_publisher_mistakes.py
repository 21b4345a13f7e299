"""A trainer's mistakes: each is one clear error, and changes nothing that is there."""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from resharder.client.errors import (
    DaemonUnreachable,
    LayoutRejected,
    MessageTooLarge,
    OutOfRoom,
    Refused,
    ResharderError,
    UsageError,
    WaitTimeout,
)
from resharder.client.trainer import session
from resharder.client.trainer.connect import DeclaredTensor, Publisher, connect
from resharder.client.trainer.rank_layout import step_number
from resharder.converters.architectures.checkpoint import expected_shapes

from tests.client.models import CONFIG, connected, declared, parts, spread, together, weights
from tests.support.daemon import Daemon
from tests.support.observing import versions

Change = Callable[[dict[str, tuple[str, tuple[int, ...]]]], dict[str, tuple[str, tuple[int, ...]]]]


def test_a_hole_is_refused_with_the_exact_difference(daemon: Daemon) -> None:
    publisher = connect(daemon.endpoint, model="policy", job="hole", config=CONFIG)
    with pytest.raises(LayoutRejected, match=r"w \[10, 4\]: element \[6, 0\] is held by no rank; so are 16 of its 40"):
        publisher.attach_tensors([DeclaredTensor("w", torch.float32, (10, 4), (slice(0, 6),))])


def test_another_rank_learns_of_the_refusal_as_well(daemon: Daemon) -> None:
    publishers = [connect(daemon.endpoint, model="policy", job="two", rank=r, world_size=2, config=CONFIG) for r in range(2)]

    def attach(rank: int) -> str:
        with pytest.raises(LayoutRejected) as refusal:
            publishers[rank].attach_tensors([DeclaredTensor("w", "F32", (10, 4))])
        return str(refusal.value)

    assert all("more than one rank" in message for message in together(attach, 2))


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 48, "tie_word_embeddings": True,
}  # fmt: skip
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def small() -> Iterator[Daemon]:
    with Daemon(store_limit_bytes=16 << 20, keep_count=1) as running:
        yield running


def attach_llama(daemon: Daemon, job: str, change: Change = lambda tensors: tensors, model: str = "llama") -> Publisher:
    """The Llama with its tensors changed: {name: (dtype, shape)}."""
    tensors = change({name: ("F32", shape) for name, shape in expected_shapes(LLAMA).items()})
    publisher = connect(daemon.endpoint, model=model, job=job, config=LLAMA)
    publisher.attach_tensors([DeclaredTensor(name, dtype, shape) for name, (dtype, shape) in tensors.items()])
    return publisher


def publish_llama(publisher: Publisher) -> None:
    ones = [(name, torch.ones(shape)) for name, shape in expected_shapes(LLAMA).items()]
    with publisher:
        publisher.publish_tensors(1, ones).wait_ready(60)


@pytest.mark.parametrize(
    ("change", "model", "kind", "reason", "message"),
    [
        (
            lambda t: {n: t[n] for n in t if n != NORM},
            "llama",
            LayoutRejected,
            "LAYOUT_MISMATCH",
            f"{NORM} [32] is held by no rank",
        ),
        (lambda t: t | {"extra": ("F32", (2,))}, "llama", LayoutRejected, "LAYOUT_MISMATCH", "extra: not a tensor of this model"),
        (lambda t: t | {NORM: ("F32", (31,))}, "llama", LayoutRejected, "LAYOUT_MISMATCH", f"{NORM}: expected [32], found [31]"),
        (lambda t: t | {NORM: ("F8_E5M2", (32,))}, "llama", UsageError, "USAGE", f"{NORM}: expected one of BF16, F16, F32"),
        (lambda t: t, "../llama", Refused, "MODEL_NAME", "that starts with a letter or digit, got '../llama'"),
        (lambda t: t | {"b": ("U8", (16 << 20,))}, "other", OutOfRoom, "NO_ROOM", "no room: model other needs 3 versions of 16."),
    ],
    ids=["missing tensor", "extra tensor", "wrong shape", "wrong dtype", "path-like model name", "full store"],
)
def test_a_trainers_mistake_is_one_clear_error_and_changes_nothing_that_is_there(
    small: Daemon, change: Change, model: str, kind: type[ResharderError], reason: str, message: str
) -> None:
    publish_llama(attach_llama(small, f"before {message}"))
    before, known = held_by(small), versions(small)
    with pytest.raises(kind) as refusal:
        attach_llama(small, f"mistaken {message}", change, model)
    assert (type(refusal.value), refusal.value.reason) == (kind, reason)
    assert message in str(refusal.value)
    assert (held_by(small), versions(small)) == (before, known)
    publish_llama(attach_llama(small, f"after {message}"))  # the refused job is not in the way


def held_by(daemon: Daemon) -> dict[str, bytes]:
    """Every file of a READY version, and of the models' small files; and the names of folders outside of the store."""
    found = {
        str(path.relative_to(daemon.store)): path.read_bytes()
        for part in ("versions", "files")
        for path in daemon.store.glob(f"models/*/{part}/**/*")
        if path.is_file()
    }
    return found | {str(path): b"" for path in daemon.folder.parent.glob("llama*")}


def test_ranks_that_disagree_on_a_dtype_are_both_told(daemon: Daemon) -> None:
    publishers = [connect(daemon.endpoint, model="policy", job="dtypes", rank=r, world_size=2, config=CONFIG) for r in range(2)]

    def attach(rank: int) -> tuple[str, str]:
        half = slice(5 * rank, 5 * rank + 5)
        with pytest.raises(LayoutRejected) as refusal:
            publishers[rank].attach_tensors([DeclaredTensor("w", ("F32", "BF16")[rank], (10, 4), (half,))])
        return refusal.value.reason, str(refusal.value)

    for reason, message in together(attach, 2):
        assert reason == "TENSOR_MISMATCH"
        assert "another rank has" in message


def test_what_was_not_registered_or_does_not_come_is_named(daemon: Daemon) -> None:
    (publisher,) = connected(daemon.endpoint, 1, "names")
    full = weights(1)
    with pytest.raises(UsageError, match="surprise: this rank registered no such tensor"):
        publisher.publish_tensors(1, [("surprise", torch.zeros(3))])
    with pytest.raises(UsageError, match="were not given: norm"):
        publisher.publish_tensors(1, [item for item in parts(full, spread(1)[0]) if item[0] != "norm"])
    with pytest.raises(UsageError, match=r"norm\[0:7\]: expected F32 \[7\] as registered, got torch.float64"):
        publisher.publish_tensors(1, [("norm", torch.zeros(7, dtype=torch.float64))])
    with pytest.raises(UsageError, match="was given twice"):
        publisher.publish_tensors(1, [("norm", full["norm"]), ("norm", full["norm"])])


def test_ranks_that_never_register_end_the_wait(daemon: Daemon) -> None:
    publisher = connect(daemon.endpoint, model="policy", job="alone", rank=0, world_size=2, config=CONFIG, register_timeout=0.5)
    with pytest.raises(WaitTimeout, match=r"ranks have not registered: \[1\]"):
        publisher.attach_tensors(declared(spread(2)[0]))


def test_a_registration_that_is_too_large_for_the_daemon_is_refused_with_its_limit_and_how_to_raise_it() -> None:
    many = [DeclaredTensor(f"a.rather.long.name.of.a.tensor.that.is.one.of.very.many.{i:06}", "F32", (1,)) for i in range(40_000)]
    with (
        Daemon(max_message_bytes=2 << 20) as daemon,
        connect(daemon.endpoint, model="policy", job="large", config=CONFIG) as publisher,
        pytest.raises(MessageTooLarge, match=r"at most 2097152 bytes.* RESHARDERD_MAX_MESSAGE_BYTES=") as caught,
    ):
        publisher.attach_tensors(many)
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


def test_no_daemon_is_one_clear_error_in_bounded_time() -> None:
    publisher = connect("127.0.0.1:1", model="policy", config=CONFIG, connect_timeout=0.5)
    with pytest.raises(DaemonUnreachable, match=r"127\.0\.0\.1:1"):
        publisher.attach_tensors(declared(spread(1)[0]))


def test_a_forked_process_is_told_to_connect_by_itself(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    (publisher,) = connected(daemon.endpoint, 1, "fork")
    mine = os.getpid()
    monkeypatch.setattr(session, "os", SimpleNamespace(getpid=lambda: mine + 1))
    with pytest.raises(UsageError, match="forked"):
        publisher.publish_tensors(1, [])


def test_several_ranks_without_a_shared_job_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RESHARDER_JOB"):
        connect("127.0.0.1:1", model="policy")


def test_half_an_environment_is_not_taken_for_rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="RANK=None"):
        connect("127.0.0.1:1", model="policy", job="x")


@pytest.mark.parametrize("step", [1 << 63, -1, 1.5, True, "7", None, torch.tensor(1.5)], ids=str)
def test_a_step_that_is_no_integer_from_0_to_2_63_is_refused_before_anything_is_sent(step: Any) -> None:
    with connect("127.0.0.1:1", model="policy", job="j", rank=0, world_size=1, config=CONFIG, connect_timeout=0) as publisher:
        for publish in (lambda: publisher.publish_tensors(step, [("w", torch.ones(2))]), lambda: publisher.publish(step)):
            with pytest.raises(UsageError, match="expected a step as an integer from 0 to 9223372036854775807, got"):
                publish()
        with pytest.raises(UsageError, match="expected a step as an integer"), publisher.generation(step):
            pass


def freed() -> torch.Tensor:
    tensor = torch.ones(8)[2:]
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("w", torch.eye(3).to_sparse(), "w has the layout torch.sparse_coo: pass a dense tensor"),
        ("w", torch.eye(4).to_sparse_csr(), "w has the layout torch.sparse_csr: pass a dense tensor"),
        ("w", torch.ones(2, device="meta"), "w is on the meta device and has no values"),
        ("w", freed(), "w: its memory is freed"),
        ("w\ud800", torch.ones(2), r"expected the name of a tensor as text, got 'w\\ud800'"),
        (7, torch.ones(2), "expected the name of a tensor as text, got 7"),
    ],
    ids=["sparse", "sparse rows", "meta", "freed", "surrogate", "no name"],
)
def test_a_tensor_without_elements_or_a_name_is_refused_before_anything_is_sent(name: Any, tensor: Any, message: str) -> None:
    with connect("127.0.0.1:1", model="policy", job="j", rank=0, world_size=1, config=CONFIG, connect_timeout=0) as publisher:
        good = ("good", torch.ones(2))
        for items in ([good, (name, tensor)], lambda: iter([good, (name, tensor)]), iter([good, (name, tensor)])):
            with pytest.raises(UsageError, match=message):
                publisher.publish_tensors(1, items)
        if isinstance(name, str) and not name.isascii():
            with pytest.raises(UsageError, match=message):
                publisher.attach_tensors([DeclaredTensor(name, "F32", (2,))])


@pytest.mark.parametrize("step", [0, (1 << 63) - 1, np.int64(7), torch.tensor(7)], ids=repr)
def test_every_integer_of_63_bits_is_a_step(step: Any) -> None:
    assert step_number(step) == int(step)
