"""Generation on GPUs that a trainer lends: offloaded memory is free, and random numbers of the GPU continue."""

import gc
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from resharder.client import connect
from resharder.client.trainer.offload import keep_rng, offload_memory

from tests.support.daemon import Daemon
from tests.support.observing import SERVING, servers, wait_serving
from tests.support.simulated_server import SimulatedServer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _own_memory() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def large_model() -> tuple[Any, list[torch.Tensor]]:
    """About 1 GiB with gradients, in bf16 and fp32; transposed and tied parameters, buffers. And every tensor of it."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    model: Any = torch.nn.ModuleList([*layers, torch.nn.BatchNorm1d(4096, device="cuda")])
    model[1].weight = model[0].weight
    model[2].weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16).t())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
        parameter.main_grad = torch.randn(parameter.shape, device="cuda")
    tensors = [*model.parameters(), *model.buffers()]
    return model, [*tensors, *(p.grad for p in model.parameters()), *(p.main_grad for p in model.parameters())]


def bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_what_is_offloaded_is_free_for_others_and_comes_back_bit_for_bit() -> None:
    start = torch.cuda.memory_allocated()
    model, tensors = large_model()
    before, held = bits(tensors), torch.cuda.memory_allocated() - start
    free = torch.cuda.mem_get_info()[0]
    for _ in range(2):  # the second time in pinned memory that torch has kept
        offloaded = offload_memory(model)
        assert offloaded.size_bytes > 850 * MIB
        assert torch.cuda.memory_allocated() - start <= held - offloaded.size_bytes + MIB
        assert torch.cuda.mem_get_info()[0] - free > 0.95 * offloaded.size_bytes, "the driver has it, for other processes"
        offloaded.bring_back()
        assert torch.cuda.memory_allocated() - start >= held - MIB
        assert same(bits(tensors), before)
    model[0](torch.randn(2, 4096, device="cuda", dtype=torch.bfloat16)).sum().backward()


def test_servers_have_the_memory_of_a_trainer_for_one_generation_after_another() -> None:
    model, _ = large_model()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with (
        Daemon() as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1) as publisher,
    ):
        publisher.attach(model, {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"})
        publisher.publish(1).wait_ready(60)
        with SimulatedServer(daemon, "one"):
            wait_serving(daemon, 1)
            for step in (2, 3):
                here = torch.cuda.memory_allocated()
                torch.cuda.manual_seed(step)
                with publisher.generation(step, offload=True) as generation:
                    assert {(s.state, s.version) for s in servers(daemon)} == {(SERVING, generation.version)}
                    assert torch.cuda.memory_allocated() < here - 800 * MIB
                    torch.rand(5, device="cuda")
                assert abs(torch.cuda.memory_allocated() - here) < 50 * MIB
                assert same(bits(list(model.parameters())), bits(weights))
                drawn = torch.rand(5, device="cuda")
                torch.cuda.manual_seed(step)
                assert torch.equal(torch.rand(5, device="cuda"), drawn)


def test_where_the_gpu_is_occupied_nothing_is_half_back_and_it_may_be_tried_again() -> None:
    model, tensors = large_model()
    before = bits(tensors)
    offloaded = offload_memory(model)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + offloaded.size_bytes // 2) / total)
    with pytest.raises(torch.OutOfMemoryError):
        offloaded.bring_back()
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    torch.cuda.set_per_process_memory_fraction(1.0)
    offloaded.bring_back()
    assert same(bits(tensors), before)


def test_what_another_stream_still_writes_is_waited_for() -> None:
    model: Any = torch.nn.Linear(8192, 8192, bias=False, device="cuda")
    factor = torch.randn(8192, 8192, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(20):
            factor = torch.tanh(factor @ factor)
        model.weight.copy_(factor)
    offload_memory(model).bring_back()
    torch.cuda.synchronize()
    assert torch.equal(model.weight.detach(), factor)


def test_random_numbers_on_gpus_go_on_as_if_nothing_had_been_drawn() -> None:
    device = torch.device("cuda")
    torch.cuda.manual_seed_all(3)
    torch.rand(5, device=device)
    restore = keep_rng()
    wanted = torch.rand(1000, device=device)
    torch.cuda.manual_seed_all(4)
    restore()
    assert torch.equal(torch.rand(1000, device=device), wanted)


def test_megatrons_tracker_goes_on_as_if_nothing_had_been_drawn() -> None:
    random: Any = pytest.importorskip("megatron.core.tensor_parallel.random", reason="needs megatron-core")
    random.initialize_rng_tracker(force_reset=True)
    tracker = random.get_cuda_rng_tracker()
    tracker.add("model-parallel-rng", 11)
    draw = lambda: torch.rand(100, device="cuda")  # noqa: E731

    def drawn() -> torch.Tensor:
        with tracker.fork("model-parallel-rng"):
            inside = draw()
        return torch.cat([inside, draw()])

    drawn()
    restore = keep_rng()
    wanted = drawn()
    drawn()
    restore()
    assert torch.equal(drawn(), wanted)
