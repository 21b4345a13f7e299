"""Tensors that have not changed since the version before: they are not sent again, and both versions have the same files."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
from resharder.client import VersionAborted, connect
from resharder.client.operator import Operator
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.publisher import Publisher
from resharder.converters.architectures.checkpoint import tower_shapes
from transformers import AutoConfig, AutoModelForCausalLM

from tests.client.models import exported
from tests.support.daemon import Daemon
from tests.support.node import Node, holds, nodes, patient, stored_files, wait_live
from tests.support.observing import wait_until
from tests.support.staging import stage

HOMES: dict[str, Node] = {}  # node of the ranks' host, by the daemon's endpoint
WAYS = ["shared-memory", "http", "grpc", "node"]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(data_listen="127.0.0.1:0", keep_count=2) as running:
        yield running


@pytest.fixture(scope="module")
def at_home() -> Iterator[Daemon]:
    """A daemon that no rank shares memory with, and a node on the ranks' host."""
    options = {"data_listen": "127.0.0.1:0", "keep_count": 2, "lease_seconds": 10, "shared_memory": False}
    with patient(Daemon(**options)) as running, Node(running.endpoint, "home") as node:
        wait_live(running, "home")
        HOMES[running.endpoint] = node
        yield running


@pytest.fixture
def site(request: pytest.FixtureRequest, transport: str) -> Daemon:
    """The daemon of a way."""
    found = request.getfixturevalue("at_home" if transport == "node" else "daemon")
    assert isinstance(found, Daemon)
    return found


class Trainer:
    """One rank that trains a model of which the embedding is frozen: 40 % of its bytes."""

    def __init__(self, daemon: Daemon, model: str, *, job: str = "job", transport: str = "auto", seed: int = 1, **options: Any):
        self.daemon, self.name = daemon, model
        config = tiny_hf.tiny_config("qwen3", vocab_size=10240, tie_word_embeddings=False)
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        rest = sum(each.nbytes for each in self.model.parameters()) - self.frozen.nbytes
        assert 0.39 < self.frozen.nbytes / (rest + self.frozen.nbytes) < 0.41
        self.frozen.requires_grad_(False)
        self.publisher = self.connected(job, transport, **options)
        self.publisher.attach(self.model, config)

    def connected(self, job: str, transport: str, **options: Any) -> Publisher:
        given = {"job": job, "rank": 0, "world_size": 1, "transport": chosen(transport)}
        return connect(self.daemon.endpoint, model=self.name, **given, **options)

    @property
    def frozen(self) -> torch.nn.Parameter:
        found: torch.nn.Parameter = self.model.model.embed_tokens.weight
        return found

    def train(self, seed: int) -> Tensors:
        """Change what is trained, and return all tensors as they are now."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter))
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def publish(self, step: int) -> Handle:
        return settled(self.daemon, self.publisher.publish(step))


def chosen(way: str) -> str:
    """The `transport` of `connect` for a way."""
    return "auto" if way == "node" else way


def settled(daemon: Daemon, handle: Handle) -> Handle:
    """A version that is READY, and whose frozen files its home has kept and reported."""
    handle.wait_ready(60)
    if (home := HOMES.get(daemon.endpoint)) is not None:
        wait_until(lambda: any("frozen_files_kept" in line and handle.name in line for line in home.log.read_text().splitlines()))
        time.sleep(1)
    return handle


def received(daemon: Daemon) -> dict[str, int]:
    """Bytes that each node has received."""
    return {name: node.received_daemon_bytes + node.received_peer_bytes for name, node in nodes(daemon).items()}


def model_of(handle: Handle) -> str:
    return handle.name.split("/")[1]


def sent(daemon: Daemon, handle: Handle) -> tuple[int, int]:
    """Bytes that the ranks sent of a version, and its size."""
    with Operator(daemon.endpoint) as operator:
        found = operator.version(handle.version, model=model_of(handle))
    return found.sent_bytes, found.size_bytes


def assert_is(daemon: Daemon, handle: Handle, tensors: Tensors, folder: Path) -> None:
    found = exported(daemon.endpoint, handle.name, folder)
    assert found.keys() == tensors.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, tensors[name]), f"{handle.name}: {name}"


def files_of(daemon: Daemon, handle: Handle) -> dict[str, os.stat_result]:
    folder = daemon.store / "models" / model_of(handle) / "versions" / f"{handle.version:08}"
    return {path.name: path.stat() for path in folder.glob("*.safetensors")}


def shared(daemon: Daemon, one: Handle, other: Handle) -> set[str]:
    first, second = files_of(daemon, one), files_of(daemon, other)
    return {name for name in first.keys() & second.keys() if first[name].st_ino == second[name].st_ino}


@pytest.mark.parametrize("transport", WAYS)
def test_what_is_frozen_is_sent_once_and_both_versions_have_its_file(site: Daemon, transport: str, tmp_path: Path) -> None:
    daemon = site
    trainer = Trainer(daemon, f"once-{transport}", transport=transport)
    with trainer.publisher:
        wanted = [trainer.train(1)]
        handles = [trainer.publish(1)]
        for step in (2, 3):
            wanted.append(trainer.train(step))
            handles.append(trainer.publish(step))
            size = sent(daemon, handles[-1])
            assert size[1] - size[0] == trainer.frozen.nbytes
            assert len(shared(daemon, *handles[-2:])) == 1
            for number, (handle, tensors) in enumerate(list(zip(handles, wanted, strict=True))[-2:]):
                assert_is(daemon, handle, tensors, tmp_path / f"{step}-{number}")
        first = sent(daemon, handles[0])
        assert first[0] == first[1]
        assert {handle.transport for handle in handles} == {transport}


@pytest.mark.parametrize("transport", WAYS)
def test_a_frozen_tensor_that_changes_is_sent_and_alters_no_older_version(site: Daemon, transport: str, tmp_path: Path) -> None:
    daemon = site
    trainer = Trainer(daemon, f"thawed-{transport}", transport=transport)
    with trainer.publisher:
        before = trainer.train(1)
        trainer.publish(1)
        older = trainer.publish(2)
        with torch.no_grad():
            trainer.frozen[-1, -1] += 1
        after = trainer.train(1)
        newer = trainer.publish(3)
        assert not shared(daemon, older, newer)
        size = sent(daemon, newer)
        assert size[0] == size[1]
        assert_is(daemon, older, before, tmp_path / "older")
        assert_is(daemon, newer, after, tmp_path / "newer")
        last = trainer.publish(4)
        assert len(shared(daemon, newer, last)) == 1
        assert_is(daemon, last, after, tmp_path / "last")


def test_versions_that_are_retired_and_files_that_are_used_again_alter_nothing(daemon: Daemon, tmp_path: Path) -> None:
    trainer = Trainer(daemon, "again", transport="shared-memory")
    with trainer.publisher:
        trainer.train(0)
        first = trainer.publish(1)
        held = next(path for path in (daemon.store / "models/again/versions").glob("*") if path.name.endswith("1"))
        layout = {path.name: path.read_bytes() for path in held.glob("*.safetensors")}
        opened = {name: (held / name).open("rb") for name in layout}
        wanted: Tensors = {}
        for step in range(2, 9):
            if step == 5:
                with torch.no_grad():
                    trainer.frozen.mul_(2)
            wanted = trainer.train(step)
            newest = trainer.publish(step)
        for name, file in opened.items():
            assert file.read() == layout[name], f"{first.name}: {name} was written while a process reads it"
            file.close()
        assert_is(daemon, newest, wanted, tmp_path / "newest")
        pools = [path for path in (daemon.store / "models/again/pool").glob("*/*.safetensors")]
        assert not {path.stat().st_ino for path in pools} & {each.st_ino for each in files_of(daemon, newest).values()}


def test_after_a_restart_of_the_daemon_files_are_shared_with_the_version_before(tmp_path: Path) -> None:
    with Daemon() as daemon:
        trainer = Trainer(daemon, "policy", transport="shared-memory")
        with trainer.publisher:
            before = trainer.train(1)
            older = trainer.publish(1)
            daemon.kill()
            daemon.start()
            after = trainer.train(2)
            newer = trainer.publish(2)
            assert len(shared(daemon, older, newer)) == 1
            assert sent(daemon, newer)[1] - sent(daemon, newer)[0] == trainer.frozen.nbytes
            daemon.kill()
            daemon.start()
            assert_is(daemon, older, before, tmp_path / "older")
            assert_is(daemon, newer, after, tmp_path / "newer")


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_that_somebody_has_written_is_found_and_not_shared_again(daemon: Daemon, is_open: bool, tmp_path: Path) -> None:
    trainer = Trainer(daemon, f"written-{is_open}", transport="shared-memory")
    with trainer.publisher:
        trainer.train(1)
        trainer.publish(1)
        second = trainer.publish(2)
        folder = daemon.store / "models" / model_of(second) / "versions" / f"{second.version:08}"
        name = next(path for path in sorted(folder.glob("*.safetensors")) if path.stat().st_nlink > 1)
        with name.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
            file.flush()
            wanted = trainer.train(3)
            if not is_open:
                file.close()
                with pytest.raises(VersionAborted, match=r"not what was sent: model\.embed_tokens\.weight"):
                    trainer.publish(3)
            third = trainer.publish(4)
        assert sent(daemon, third)[0] == sent(daemon, third)[1]
        assert_is(daemon, third, wanted, tmp_path / "third")
        assert len(shared(daemon, third, trainer.publish(5))) == 1


@pytest.mark.parametrize("job", ["job", "another"])
def test_another_process_or_job_sends_everything(daemon: Daemon, job: str, tmp_path: Path) -> None:
    name = f"process-of-{job}"
    trainer = Trainer(daemon, name, transport="shared-memory")
    with trainer.publisher:
        before = trainer.train(1)
        older = trainer.publish(1)
    other = Trainer(daemon, name, job=job, transport="shared-memory", seed=2)
    with other.publisher:
        after = other.train(2)
        newer = other.publish(2)
        assert sent(daemon, newer)[0] == sent(daemon, newer)[1]
        assert not shared(daemon, older, newer)
        assert_is(daemon, older, before, tmp_path / "older")
        assert_is(daemon, newer, after, tmp_path / "newer")


def test_the_store_counts_a_file_of_two_versions_once(tmp_path: Path) -> None:
    with Daemon() as daemon:
        trainer = Trainer(daemon, "policy", transport="shared-memory")
        with trainer.publisher, Operator(daemon.endpoint) as operator:
            for step in (1, 2):
                trainer.train(step)
                trainer.publish(step)
            paths = [path.stat() for path in daemon.store.rglob("*.safetensors")]
            used = sum({each.st_ino: each.st_size for each in paths}.values())
            assert used < sum(each.st_size for each in paths)
            assert operator.daemon().store_used_bytes == used


@pytest.mark.parametrize("transport", WAYS)
def test_of_several_ranks_each_leaves_out_what_it_knows(site: Daemon, transport: str, tmp_path: Path) -> None:
    daemon = site
    config = tiny_hf.tiny_config("qwen3_vl")
    (tmp_path / "base").mkdir()
    checkpoint = tiny_hf.load_checkpoint(tiny_hf.save_checkpoint(tmp_path / "base", config, seed=1))
    publishers, chunks = [], []
    for rank in range(4):
        fakepg.enter(rank, 4)
        chunks.append([chunk.language_model for chunk in build_model(config, spec="te", tp=2, pp=2)])
        fill_from_hf(chunks[-1], config, checkpoint)
        for chunk in chunks[-1]:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_("embedding" not in name)
        name = f"ranks-{transport}"
        publishers.append(connect(daemon.endpoint, model=name, job="job", rank=rank, world_size=4, transport=chosen(transport)))
        publishers[-1].attach(chunks[-1], config, frozen=tmp_path / "base", wait=False)

    def publish(step: int) -> Handle:
        handle, *_ = [publisher.publish(step) for publisher in publishers]
        return settled(daemon, handle)

    embedding = next(name for name in checkpoint if "embed_tokens" in name)
    still = [*tower_shapes(config), embedding]
    first, second = publish(1), publish(2)
    held, size = sent(daemon, second)
    assert size - held == sum(checkpoint[name].nbytes for name in still)
    assert_is(daemon, second, checkpoint, tmp_path / "second")
    with torch.no_grad():  # in rank 1's half of the embedding alone
        for name, parameter in chunks[1][0].named_parameters():
            if "embedding" in name:
                parameter[0] += 1
    rows = -(-len(checkpoint[embedding]) // 2)  # of rank 0: those of rank 1 end with padding
    checkpoint[embedding] = checkpoint[embedding].clone()
    checkpoint[embedding][rows] += 1
    third = publish(3)
    held, size = sent(daemon, third)
    assert size - held == sum(checkpoint[name].nbytes for name in tower_shapes(config)) + checkpoint[embedding][:rows].nbytes
    assert not shared(daemon, second, third)
    assert_is(daemon, third, checkpoint, tmp_path / "third")
    assert first.version < second.version < third.version
    for publisher in publishers:
        publisher.close()


def test_nodes_fetch_what_is_frozen_once_and_what_has_changed_again(daemon: Daemon) -> None:
    """Pieces come from the daemon and from another node."""
    trainer = Trainer(daemon, "nodes")
    with trainer.publisher, Node(daemon.endpoint, "one") as one, Node(daemon.endpoint, "two") as two:
        wait_live(daemon, "one", "two")
        for step in (1, 2, 3, 4):
            if step == 4:
                with torch.no_grad():
                    trainer.frozen[0] += 1
            trainer.train(step)
            handle, before = trainer.publish(step), received(daemon)
            files = stored_files(daemon, handle.name)
            for node, other in ((one, two), (two, one)):
                (other.folder / "nonce").rename(other.folder / "hidden")  # of another host
                assert stage(daemon.endpoint, handle.name) == {"verified": True, "transport": "node", "reason": ""}
                (other.folder / "hidden").rename(other.folder / "nonce")
                assert node.files(handle.name) == files
                wait_until(lambda node=node, name=handle.name: holds(daemon, node.name, name))
            fresh = sum(map(len, files.values()))
            if step in (2, 3):
                fresh -= max(len(content) for content in files.values() if len(content) < trainer.frozen.nbytes + 4096)
            wait_until(lambda before=before: all(received(daemon)[name] > before[name] for name in before))
            found = {name: total - before[name] for name, total in received(daemon).items()}
            assert found == dict.fromkeys(found, fresh), f"of step {step}"
