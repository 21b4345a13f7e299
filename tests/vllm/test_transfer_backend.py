"""vLLM's weight transfer backend `resharder`: registration, errors at the start, and the trainer's half against a real daemon."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm.distributed.weight_transfer.clients", reason="this vLLM has no factory for trainers")

from resharder.client import NotServed, Operator, ResharderTrainerInitInfo, ShardSource, UsageError
from resharder.client.inference.vllm import register
from resharder.client.inference.vllm.route_rules import RULES
from resharder.client.inference.vllm.weight_transfer import ROUTES, is_selected, replace_calls, take_over
from resharder.client.integrations.vllm import ResharderTrainerEngine
from resharder.client.integrations.weight_sources import DividedStream, owned_names
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import ModuleSource, ParamMeta, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.exceptions import VLLMServerError
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.daemon import Daemon
from tests.support.ranks import forked
from tests.support.tiny_hf import load_checkpoint, load_model, save_checkpoint, tiny_config

pytestmark = pytest.mark.compat("weight transfer")
HAS_OWNERS = hasattr(WeightSource, "iter_full")
"""Since vLLM 0.33 a source's `metadata` is a property, with the owners of each tensor."""


class Client:
    """A server's side of the API, which notes the calls; `refusal` is raised by `finish_weight_update`."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refusal = refusal

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(("init", init_info))

    def start_weight_update(self) -> None:
        self.calls.append(("start",))

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(("update", update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(("finish", weight_version))
        if self.refusal is not None:
            raise self.refusal


class Stream(WeightSource):
    """A source of its own, as an export from Megatron is; `passes` counts how often it is iterated to the end."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.passes = tensors, 0

    def _metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    metadata = cached_property(_metadata) if HAS_OWNERS else _metadata  # type: ignore[assignment]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()
        self.passes += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3_tied", num_hidden_layers=2), seed=3)


def start(daemon: Daemon, folder: Path, source: Any, client: Client, name: str, **fields: Any) -> ResharderTrainerEngine:
    info = ResharderTrainerInitInfo(rank=0, model=name, endpoint=daemon.endpoint, tokenizer=folder, **fields)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def exported(daemon: Daemon, model: str, number: int, target: Path) -> dict[str, torch.Tensor]:
    with Operator(daemon.endpoint) as operator:
        operator.export(number, target, model=model)
    return load_checkpoint(target)


def test_the_plugin_registers_both_halves_with_and_without_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESHARDER_ENDPOINT", raising=False)
    register()
    register()
    assert WeightTransferTrainerFactory._registry["resharder"]() is ResharderTrainerEngine
    config = SimpleNamespace(parallel_config=None, model_config=None)
    with pytest.raises(UsageError, match=r"backend resharder cannot start: RESHARDER_ENDPOINT is not set"):
        WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend="resharder"), config, "cpu", None)
    monkeypatch.setenv("RESHARDER_ENDPOINT", "127.0.0.1:7677")
    monkeypatch.setenv("RESHARDER_SERVER_ID", "a")
    engine = WeightTransferEngineFactory.create_engine(WeightTransferConfig(backend="resharder"), config, "cpu", None)
    with pytest.raises(UsageError, match="because it has no control side: name resharder in VLLM_PLUGINS"):
        engine.init_transfer_engine(engine.parse_init_info({"model": "policy"}))
    engine.shutdown()


def test_only_the_backends_own_configuration_selects_it() -> None:
    assert is_selected(SimpleNamespace(weight_transfer_config=WeightTransferConfig(backend="resharder")))
    for other in (None, WeightTransferConfig(backend="nccl")):
        assert not is_selected(SimpleNamespace(weight_transfer_config=other))
    assert not is_selected(SimpleNamespace())
    assert {("POST", route) for route in ROUTES} - RULES.keys() == {("POST", "/get_world_size")}, "which is a GET"


class Updates:
    """The control side's half, which notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    async def init(self, info: Any) -> None:
        self.calls.append(("init", info))

    async def update(self, info: Any) -> None:
        if info == {"version": 9}:
            raise NotServed("the daemon has no version 9")
        self.calls.append(("update", info))

    async def finish(self, label: str | None) -> None:
        self.calls.append(("finish", label))


class Workers:
    """An engine core's client, which notes the calls of the workers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def collective_rpc_async(self, method: str, *_: Any) -> list[None]:
        self.calls.append(method)
        return [None]

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def actor(attach: Callable[[Any], Awaitable[None]] | None) -> AsyncLLM:
    """An engine without its processes, of a class that has copies of vLLM's methods, as Ray makes them for an actor."""
    copies = {name: method for name, method in vars(AsyncLLM).items() if inspect.iscoroutinefunction(method)}
    engine = type("Actor", (AsyncLLM,), copies | {"__init__": lambda self: None})()
    engine.engine_core = Workers()
    for _ in range(2):  # by the engine's class, and by `attach`
        replace_calls(engine, attach)
    return engine


def test_methods_that_ray_bound_before_the_plugin_was_loaded_reach_the_control_side() -> None:
    updates, attached = Updates(), []

    async def attach(engine: Any) -> None:
        attached.append(engine)
        await asyncio.sleep(0)
        take_over(engine, updates)

    async def main() -> None:
        engine = actor(attach)
        init = WeightTransferInitRequest(init_info={"model": "policy"})
        await asyncio.gather(*(AsyncLLM.init_weight_transfer_engine(engine, init) for _ in range(2)))
        assert attached == [engine], "the first call attaches the engine, once"
        await AsyncLLM.start_weight_update(engine)
        await AsyncLLM.update_weights(engine, WeightTransferUpdateRequest(update_info={"version": 7}))
        await AsyncLLM.finish_weight_update(engine)
        await engine.finish_weight_update("7")
        with pytest.raises(VLLMServerError, match="the daemon has no version 9"):
            await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": 9}))
        with pytest.raises(ValueError, match="a version has the drafter's weights too: call start_weight_update instead"):
            await AsyncLLM.start_draft_weight_update(engine)
        if hasattr(AsyncLLM, "shutdown_weight_transfer_engine"):  # later than 0.28
            await AsyncLLM.shutdown_weight_transfer_engine(engine)
        assert engine.engine_core.calls == []
        await engine.collective_rpc("resharder_describe")
        assert engine.engine_core.calls == ["resharder_describe"]

    asyncio.run(main())
    init = ("init", {"model": "policy"})
    assert updates.calls == [init, init, ("update", {"version": 7}), ("finish", None), ("finish", "7")]


def test_calls_of_an_engine_that_cannot_be_attached_are_errors() -> None:
    async def attach(engine: Any) -> None:
        raise UsageError("expected the daemon's endpoint")

    async def main() -> None:
        engine = actor(attach)
        with pytest.raises(ValueError, match="expected the daemon's endpoint"):
            await engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"model": "policy"}))
        await engine.update_weights(WeightTransferUpdateRequest(update_info={"version": 7}))
        await engine.finish_weight_update()
        assert engine.engine_core.calls == ["update_weights", "finish_weight_update"], (
            "whose error names the missing control side"
        )

    asyncio.run(main())


def test_a_modules_weights_become_versions_under_their_names_on_disk(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    model, client = load_model(folder), Client()
    engine = start(daemon, folder, ModuleSource(model), client, "module")
    assert client.calls == [("init", {"model": "module"})]
    engine.send_weights()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    engine.send_weights()
    with Operator(daemon.endpoint) as operator:
        prints = [operator.version(number, model="module").fingerprint for number in (1, 2)]
    rounds = [
        [("start",), ("update", {"version": number, "fingerprint": found}), ("finish", str(number))]
        for number, found in enumerate(prints, 1)
    ]
    assert client.calls[1:] == [call for calls in rounds for call in calls]
    first, second = (exported(daemon, "module", number, tmp_path / str(number)) for number in (1, 2))
    disk = load_checkpoint(folder)
    assert first.keys() == second.keys() == disk.keys()
    assert all(torch.equal(first[name], disk[name]) for name in disk)
    changed = [name for name in disk if not torch.equal(first[name], second[name])]
    assert changed == ["model.norm.weight"]
    engine.shutdown()


def test_a_stream_of_whole_tensors_is_published_as_it_comes(daemon: Daemon, folder: Path, tmp_path: Path) -> None:
    disk = load_checkpoint(folder)
    config = load_model(folder).config
    engine = start(daemon, folder, Stream(disk), Client(), "stream", config=config)
    engine.send_weights(step=40)
    assert engine.handle is not None
    assert engine.handle.step == 40
    found = exported(daemon, "stream", 1, tmp_path / "out")
    assert found.keys() == disk.keys()
    assert all(torch.equal(found[name], disk[name]) for name in disk)
    engine.shutdown()


@pytest.mark.full
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed beside this vLLM")
def test_four_megatron_ranks_send_their_shards_and_ranks_of_a_pipeline_their_stages(
    daemon: Daemon, folder: Path, tmp_path: Path
) -> None:
    forked("tests.vllm.transfer_ranks", daemon.endpoint, folder)
    disk = load_checkpoint(folder)
    for name in ("shards", "stages"):
        found = exported(daemon, name, 2, tmp_path / name)
        assert found.keys() == disk.keys()
        assert all(torch.equal(found[key], disk[key]) for key in disk)


def test_what_a_server_answers_is_in_the_error_that_the_trainer_gets(daemon: Daemon, folder: Path) -> None:
    refusal = RuntimeError("500 Server Error")
    refusal.response = SimpleNamespace(json=lambda: {"error": {"message": "fleet policy is pinned to version 1"}})
    engine = start(daemon, folder, ModuleSource(load_model(folder)), Client(refusal), "refused")
    expected = "expected models/refused/versions/1 to be served, got fleet policy is pinned to version 1"
    with pytest.raises(NotServed, match=expected):
        engine.send_weights()
    engine.client.refusal = ConnectionError("nobody answers")
    with pytest.raises(NotServed, match="versions/2 to be served, got ConnectionError: nobody answers"):
        engine.send_weights()
    engine.client.refusal = RuntimeError("Traceback of an actor")
    engine.client.refusal.cause = ValueError("server a is drained")  # as Ray's errors have it
    with pytest.raises(NotServed, match="versions/3 to be served, got server a is drained"):
        engine.send_weights()
    engine.client.refusal = None
    engine.send_weights()
    assert engine.handle is not None
    assert engine.handle.version == 4
    engine.shutdown()


def test_wrong_arguments_are_one_error_before_anything_is_published(
    daemon: Daemon, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RESHARDER_MODEL", raising=False)
    client = Client()
    with pytest.raises(UsageError, match="no source was given: pass a WeightSource"):
        start(daemon, folder, None, client, "wrong")
    with pytest.raises(UsageError, match="the model has no name: set ResharderTrainerInitInfo"):
        start(daemon, folder, Stream({}), client, "")
    with pytest.raises(UsageError, match="the model's Hugging Face config is missing"):
        start(daemon, folder, Stream({}), client, "wrong")
    with pytest.raises(UsageError, match="the model's Hugging Face config is missing"):
        start(daemon, folder, ShardSource([torch.nn.Linear(2, 2)]), client, "wrong")
    assert client.calls == []


def test_every_tensor_is_published_by_one_of_the_ranks_that_hold_it() -> None:
    names = [f"layers.{number}" for number in range(7)]
    everywhere = [owned_names(names, [None, None, None], rank) for rank in range(3)]
    assert sorted(name for owned in everywhere for name in owned) == names
    assert {len(owned) for owned in everywhere} == {2, 3}
    pipeline = [names[:3], names[3:], names[3:]]
    divided = [owned_names(names, pipeline, rank) for rank in range(3)]
    assert divided[0] == set(names[:3])
    assert divided[1] | divided[2] == set(names[3:])
    assert not divided[1] & divided[2]
    with pytest.raises(UsageError, match=r"layers.3: none of the 2 ranks holds it"):
        owned_names(names, [names[:3], names[4:]], 0)


def test_a_stream_that_was_left_early_is_iterated_to_its_end_for_the_other_ranks() -> None:
    source = Stream({"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)})
    stream = DividedStream(source, {"a", "b"})
    taken = iter(stream)
    assert next(taken)[0] == "a"
    stream.drain()
    assert source.passes == 1
    with pytest.raises(UsageError, match="a: this rank holds it, but its tensor is None"):
        list(DividedStream([("a", None)], {"a"}))


def test_a_module_that_is_sharded_after_trainer_init_is_refused_with_what_to_do(daemon: Daemon, folder: Path) -> None:
    model = load_model(folder)
    engine = start(daemon, folder, ModuleSource(model), Client(), "late")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match=r"over a mesh of \(1,\): attach after fully_shard or parallelize_module"):
            engine.send_weights()
    finally:
        engine.shutdown()
        dist.destroy_process_group()
