"""A trainer's memory, offloaded and back, and what else it must find as it left it."""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import fakepg
from tests.support.megatron_models import build_model, wrap_ddp

# isort: split
import torch
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from resharder.client.errors import UsageError
from resharder.client.trainer import offload
from resharder.client.trainer.offload import eval_mode, keep_rng, offload_memory

from tests.support.tiny_hf import tiny_config
from tests.support.variants import sampled

pytestmark = pytest.mark.compat("offload")

CONFIG = tiny_config("qwen3_moe")


@pytest.fixture(autouse=True)
def _as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_DEVICE", "cpu")


@pytest.fixture
def _alone() -> Iterator[None]:
    fakepg.enter(0, 1)
    yield
    fakepg.leave()


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Of copies: memory that numpy has seen may not be freed any more."""
    return [
        tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
        for tensor in tensors
    ]


def scramble(tensors: Sequence[torch.Tensor]) -> None:
    """Any bits, NaN and denormal numbers too."""
    for tensor in tensors:
        size = tensor.untyped_storage().nbytes()
        flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        flat.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("distributed_optimizer", sampled([False, True], [True]))
def test_a_megatron_model_under_ddp_comes_back_bit_for_bit_in_every_view(
    distributed_optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_BLOCK", 100_003)  # storages are cut over blocks, at odd places
    (wrapped,) = wrap_ddp(build_model(CONFIG, spec="te"), overlap=distributed_optimizer)
    ddp: Any = wrapped
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    tensors = [*ddp.parameters(), *(tensor for _, tensor in ddp.named_buffers())]
    tensors += [buffer.grad_data for buffer in buffers] + [p.main_grad for p in ddp.parameters()]
    if distributed_optimizer:
        tensors += [bucket.param_data for buffer in buffers for bucket in buffer.buckets]
    scramble(tensors)
    before = bits(tensors)

    offloaded = offload_memory([ddp])
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    assert offloaded.size_bytes == sum(set_sizes(before, tensors, offloaded.bring_back).values())
    assert bits(tensors) == before
    with torch.no_grad():
        for buffer in buffers:
            buffer.grad_data.fill_(3)
    assert all(bool((p.main_grad == 3).all()) for p in ddp.parameters()), "views are views of one memory as before"


def set_sizes(before: list[bytes], tensors: Sequence[torch.Tensor], bring_back: Callable[[], None]) -> dict[int, int]:
    """Bytes of each storage."""
    bring_back()
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def test_gradients_tied_and_transposed_parameters_and_state_dicts_come_back() -> None:
    model: Any = torch.nn.Sequential(
        torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)
    )
    model[1].weight = model[0].weight
    model[3].weight = torch.nn.Parameter(torch.randn(8, 4).t())
    model(torch.tensor([1, 2, 3])).sum().backward()
    state = model.state_dict()
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    for form, held in ((model, tensors), (state, list(state.values()))):
        before, same = bits(held), [id(tensor) for tensor in model.parameters()]
        offloaded = offload_memory(form)
        assert not any(tensor.untyped_storage().nbytes() for tensor in held)
        offloaded.bring_back()
        assert bits(held) == before
        assert [id(tensor) for tensor in model.parameters()] == same
    model(torch.tensor([1, 2, 3])).sum().backward()  # autograd knows them still


class Configured(torch.nn.Linear):
    def __init__(self, config: dict[str, Any], ddp_config: dict[str, Any]) -> None:
        super().__init__(2, 2)
        self.config, self.ddp_config = SimpleNamespace(**config), SimpleNamespace(**ddp_config)


class Mapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.from_numpy(np.ones(3, np.float32)))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (torch.nn.Sequential(torch.nn.Linear(2, 2), Mapped()), r"1\.weight: .*something else uses it too"),
        (Configured({"cuda_graph_impl": "local"}, {}), "CUDA graphs"),
        (Configured({"enable_cuda_graph": True}, {}), "CUDA graphs"),
        (Configured({"cuda_graph_impl": "none"}, {"nccl_ub": True}), "nccl_ub"),
    ],
)
def test_memory_whose_address_somebody_else_knows_is_refused_and_stays(model: torch.nn.Module, why: str) -> None:
    before = bits(list(model.parameters()))
    with pytest.raises(UsageError, match=why):
        offload_memory(model)
    assert bits(list(model.parameters())) == before


def test_every_module_is_in_the_mode_that_it_was_in() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Linear(2, 2)))
    model[1].eval()
    model[1][1].train()
    modes = [module.training for module in model.modules()]
    restore = eval_mode([model])
    assert not any(module.training for module in model.modules())
    model[0].train()
    restore()
    assert [module.training for module in model.modules()] == modes
    assert len(set(modes)) == 2


def drawn() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.normal(),
        float(torch.randn(1)),
        float(torch.rand(1)),
    ]


def test_random_numbers_go_on_as_if_nothing_had_been_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's tracker with both kinds of state: tensors, which it replaces, and generators, which go on."""
    tracker: Any = CudaRNGStatesTracker()
    going, state = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6).get_state()
    tracker.set_states({"going": going, "replaced": state})
    monkeypatch.setattr(sys.modules[CudaRNGStatesTracker.__module__], "_CUDA_RNG_STATE_TRACKER", tracker)
    drawn()  # leaves the second number of a pair behind, in each gauss
    restore = keep_rng()
    wanted = [*drawn(), torch.rand(3, generator=going).tolist()]
    tracker.states_["replaced"] = torch.Generator().manual_seed(7).get_state()
    tracker.states_["new"] = going
    restore()
    assert [*drawn(), torch.rand(3, generator=going).tolist()] == wanted
    assert torch.equal(tracker.get_states()["replaced"], state)
    assert tracker.get_states()["going"] is going
    assert "new" not in tracker.get_states()
