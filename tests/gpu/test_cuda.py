"""What needs a GPU: trainers whose tensors are there, and vLLM servers whose weights are there."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from resharder.client import connect
from resharder.client.inference.vllm.host import VLLMHost
from resharder.client.inference.worker import memory
from resharder.client.inference.worker.memory import Fault
from resharder.converters.geometry.layout import Range, box_index, full_box
from resharder.converters.storage.digest import digest, digest_torch
from safetensors.torch import load_file

from tests.support.daemon import Daemon
from tests.support.moe_pieces import moe_pieces
from tests.support.observing import export, wait_serving
from tests.support.tiny_hf import save_tokenizer, tiny_config
from tests.support.vllm_server import VllmServer
from tests.support.weights import random_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
PROMPTS = ([5, 17, 42, 7, 300, 11], [800, 2, 9])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_the_digest_of_a_tensor_on_the_gpu_is_that_of_its_bytes_on_the_host(dtype: torch.dtype) -> None:
    tensor = torch.randn(513, 7, 255).to(dtype)
    box = (Range(1, 200, 2), Range(0, 7), Range(3, 100))
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[tensor.element_size()]
    for chosen in (box, full_box(tuple(tensor.shape))):
        on_host = tensor.view(unsigned).numpy()[box_index(chosen)]
        on_gpu = tensor.cuda()[box_index(chosen)]
        assert digest_torch(on_gpu, chosen, tuple(tensor.shape)) == digest(on_host, chosen, tuple(tensor.shape))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_tensors_of_a_gpu_arrive_bit_for_bit_and_may_be_overwritten_at_once(shared_memory: bool, tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    save_tokenizer(tmp_path, config["vocab_size"])
    weights = random_weights(config, 1, torch.bfloat16)
    on_gpu = {name: transposed_in_memory(tensor.cuda()) for name, tensor in weights.items()}
    with (
        Daemon(shared_memory=shared_memory) as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=tmp_path) as publisher,
    ):
        for step in (1, 2):
            handle = publisher.publish_tensors(step, on_gpu.items())
            for name, tensor in on_gpu.items():
                tensor.fill_(float("nan"))
                on_gpu[name] = weights[name].cuda()
            handle.wait_ready(60)
            export(daemon, handle.name, tmp_path / str(step))
            found = load_file(tmp_path / str(step) / "model.safetensors")
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[name].view(torch.int16), weights[name].view(torch.int16)) for name in weights)


@pytest.mark.parametrize(("family", "shared_memory"), [("qwen3_tied", True), ("qwen3_moe", False)])
def test_an_updated_server_on_a_gpu_answers_exactly_as_a_fresh_one(family: str, shared_memory: bool, tmp_path: Path) -> None:
    config = tiny_config(family, dtype="bfloat16")
    save_tokenizer(tmp_path, config["vocab_size"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (
        Daemon(shared_memory=shared_memory) as daemon,
        connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, config=config, tokenizer=tmp_path) as publisher,
    ):
        publisher.publish_tensors(1, random_weights(config, 1, torch.bfloat16).items()).wait_ready(60)
        environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "VLLM_PLUGINS": "resharder"}
        with VllmServer(tmp_path, ["--load-format", "resharder"], environment, dtype="bfloat16") as server:
            first = [server.generate(prompt, 12) for prompt in PROMPTS]
            publisher.publish_tensors(2, random_weights(config, 2, torch.bfloat16).items()).wait_serving(120)
            (worker,) = wait_serving(daemon, 2).workers
            updated = [server.generate(prompt, 12) for prompt in PROMPTS]
        print(f"{family}: staged {worker.stage_seconds:.3f} s, applied {worker.apply_seconds:.3f} s, boxed {worker.boxed_bytes}")
        assert worker.boxed_bytes >= 0.99 * worker.needed_bytes
        assert {answer.version for answer in updated} == {"2"}
        export(daemon, "models/policy/versions/2", tmp_path / "exported")
    with VllmServer(tmp_path / "exported", dtype="bfloat16") as fresh:
        reference = [fresh.generate(prompt, 12) for prompt in PROMPTS]
    assert [(a.token_ids, a.logprobs) for a in updated] == [(a.token_ids, a.logprobs) for a in reference]
    assert [a.token_ids for a in first] != [a.token_ids for a in reference]


def test_the_host_waits_once_for_all_pieces_of_an_install() -> None:
    live, pieces, source, wanted = moe_pieces("cuda")
    host = VLLMHost(SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)), torch.device("cuda"), 0)
    memory.write_all(host, live, pieces[:1], source, Fault())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            written = memory.write_all(host, live, pieces, source, Fault())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "synchroniz" in str(wait.message)]) <= 1
    assert all(found == source.expected[piece.tensor, piece.box] for piece, found in written)
    assert torch.equal(live["w13"].cpu(), wanted)


def transposed_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor
