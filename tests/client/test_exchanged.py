"""Parameters that a trainer exchanges after `attach`: what is published is what the model has now, or is refused by name."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.trainer.connect import connect
from resharder.client.trainer.rank_layout import LiveTensors
from resharder.converters.models import local_layout
from resharder.converters.models.megatron.layout import local_pieces
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.weights import random_weights

CONFIG = tiny_hf.tiny_config("qwen3", num_hidden_layers=2)
TIED = tiny_hf.tiny_config("qwen3_tied", num_hidden_layers=2)
NOBODY = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"]}
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    fakepg.enter(0, 1)
    yield
    fakepg.leave()


def hf_model(config: dict[str, Any] = CONFIG) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def attached(model: Any, config: dict[str, Any] = CONFIG) -> Callable[[], dict[str, torch.Tensor]]:
    """Read what a publish delivers, by name on disk."""
    layout, tensors = local_layout(model, config)
    live = LiveTensors(layout, tensors)
    positions = range(len(layout.pieces))

    def read() -> dict[str, torch.Tensor]:
        live.check()
        return {layout.pieces[number].tensor: tensor.clone() for number, tensor in live.items(positions)}

    return read


def now(model: Any) -> dict[str, torch.Tensor]:
    """The model's own state, of one rank."""
    found = model.state_dict() if isinstance(model, torch.nn.Module) else model
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}


def assign(model: Any) -> None:
    model.load_state_dict({name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}, assign=True)


def set_parameter(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.weight = torch.nn.Parameter(torch.randn_like(model.get_parameter(GATE)))


def replace_layer(model: Any) -> None:
    layer = deepcopy(model.model.layers[1])
    for parameter in layer.parameters():
        parameter.data.add_(1)
    model.model.layers[1] = layer


def move(model: Any) -> None:
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def wrap(model: Any) -> None:
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])


EXCHANGES = [assign, set_parameter, replace_layer, move, wrap]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda act: act.__name__)
@pytest.mark.parametrize("shard", [False, True], ids=["plain", "fsdp"])
def test_a_version_has_the_values_of_parameters_that_were_exchanged(exchange: Callable[[Any], None], shard: bool) -> None:
    model = hf_model()
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    read = attached(model)
    for _ in range(2):
        if not (shard and exchange is set_parameter):  # FSDP has no plain parameters
            exchange(model)
        step(model)
        names = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in now(model).items()}
        assert equal(read(), names)


def step(model: Any) -> None:
    """One optimizer step, whose gradients are the weights themselves."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    torch.optim.SGD(model.parameters(), lr=0.125).step()


def test_shards_are_read_where_a_forward_pass_has_left_parameters_whole() -> None:
    model = hf_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    read = attached(model)
    for _ in range(2):
        step(model)
        model(input_ids=torch.tensor([[1, 2, 3]]))  # leaves the root's parameters whole
        assert not isinstance(model.lm_head.weight, DTensor)
        assert equal(read(), now(model))


def shard_later(model: Any) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


def parallelize_later(model: Any) -> None:
    parallelize_module(model.model.layers[0], init_device_mesh("cpu", (1,)), {"mlp.gate_proj": ColwiseParallel()})


def adapt_later(model: Any) -> None:
    inner = model.model.layers[0].mlp.gate_proj
    adapter = torch.nn.Module()
    adapter.base_layer, adapter.lora_a = inner, torch.nn.Linear(inner.in_features, 4)
    model.model.layers[0].mlp.gate_proj = adapter


def add_later(model: Any) -> None:
    gate = model.model.layers[0].mlp.gate_proj
    gate.bias = torch.nn.Parameter(torch.zeros(gate.out_features))


def widen(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.weight = torch.nn.Parameter(model.get_parameter(GATE).detach()[:-1].clone())


def cast(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.weight = torch.nn.Parameter(model.get_parameter(GATE).detach().to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shard_later, r"weight was torch.float32 \[.*\], and is .* over a mesh of \(1,\): attach after fully_shard or parallel"),
        (parallelize_later, rf"{GATE} was .*: attach after fully_shard or parallelize_module"),
        (adapt_later, rf"{GATE} is gone: attach again"),
        (add_later, r"model.layers.0.mlp.gate_proj.bias is new: attach again"),
        (widen, rf"{GATE} was torch.float32 \[\d+, 128\], and is torch.float32 \[\d+, 128\]: attach again"),
        (cast, rf"{GATE} was torch.float32 \[\d+, 128\], and is torch.bfloat16 \[\d+, 128\]: attach again"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_changed_its_shape_placement_or_module_is_refused_by_name(change: Callable[[Any], None], message: str) -> None:
    model = hf_model()
    read = attached(model)
    change(model)
    with pytest.raises(UsageError, match=message):
        read()


@pytest.mark.parametrize("config", [TIED, NOBODY], ids=["table", "no table"])
def test_a_tie_that_breaks_after_attach_is_refused(config: dict[str, Any]) -> None:
    model = hf_model(TIED)
    read = attached(model, config)
    assert "lm_head.weight" not in read()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(UsageError, match=r"lm_head.weight no longer shares the memory of model.embed_tokens.weight: tie them"):
        read()
    model.tie_weights()
    read()


def test_tied_parameters_that_are_exchanged_together_are_read() -> None:
    model = hf_model(TIED)
    read = attached(model, TIED)
    model.model.embed_tokens.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.tie_weights()
    assert torch.equal(read()["model.embed_tokens.weight"], model.lm_head.weight)


def test_tensors_of_a_state_dict_are_those_that_it_has_at_each_publish() -> None:
    state = {"a": torch.ones(2), "b": torch.ones(3)}
    read = attached(state, NOBODY)
    state["a"] = torch.full((2,), 5.0)
    state["b"].add_(1)
    assert equal(read(), state)
    del state["b"]
    with pytest.raises(UsageError, match="b is gone"):
        read()


def test_megatron_parameters_that_were_exchanged_are_read() -> None:
    config = tiny_hf.tiny_config("qwen3_moe")
    (chunk,) = build_model(config)
    fill_from_hf([chunk], config, random_weights(config, 1))
    layout, tensors = local_layout(chunk, config)
    live, positions = LiveTensors(layout, tensors), range(len(layout.pieces))
    chunk.load_state_dict({n: t.clone() + 1 for n, t in chunk.state_dict().items() if t is not None}, assign=True, strict=False)
    (other,) = build_model(config)
    fill_from_hf([other], config, random_weights(config, 2))
    chunk.decoder.layers[0] = other.decoder.layers[0]
    live.check()
    expected = [tensor for _, _, tensor in local_pieces([chunk], config)]
    assert all(torch.equal(tensor, want) for (_, tensor), want in zip(live.items(positions), expected, strict=True))
    chunk.decoder.layers[0].mlp.router.weight = torch.nn.Parameter(torch.zeros(1, 1))
    with pytest.raises(UsageError, match=r"0.decoder.layers.0.mlp.router.weight was .*: attach again"):
        live.check()


def freed(model: Any) -> None:
    model.get_parameter(GATE).untyped_storage().resize_(0)


def meta(model: Any) -> None:
    model.to("meta")


@pytest.mark.parametrize(
    ("act", "message"), [(freed, f"{GATE}: its memory is freed"), (meta, "is on the meta device and has no values")]
)
def test_a_publish_without_memory_aborts_its_version_with_the_tensors_name(act: Any, message: str, tmp_path: Path) -> None:
    model = hf_model()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Daemon() as daemon, connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1) as publisher:
        publisher.attach(model, CONFIG)
        act(model)
        with pytest.raises(UsageError, match=message):
            publisher.publish(1)
        with Operator(daemon.endpoint) as operator:
            (version,) = operator.versions()
            assert (version.state.value, message in version.reason) == ("ABORTED", True)
        model.load_state_dict(kept, assign=True)
        publisher.publish(2).wait_ready(60)
        assert equal(exported(daemon.endpoint, "latest", tmp_path / "out"), kept)
