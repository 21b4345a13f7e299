"""FP8 blocks in every worker of a server: recorded without a server and without weights."""

import pytest
from resharder.client.errors import UsageError
from resharder.client.inference.vllm.blueprint import ServerSizes, worker_recording
from resharder.client.tools.check import check, parallel
from resharder.converters.errors import UnsupportedModel
from resharder.converters.models.tensor_io import DTYPES
from resharder.converters.quantization.checkpoint import block_specs

from tests.support.fp8_checkpoint import BLOCK, SHAPES, fp8_config, fp8_weights

SERVERS = (ServerSizes(), ServerSizes(tp=2), ServerSizes(tp=2, ep=True))


@pytest.mark.parametrize("family", SHAPES)
def test_tensors_of_an_fp8_checkpoint_follow_from_its_config(family: str) -> None:
    config = fp8_config(family)
    found = {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in fp8_weights(config, 1).items()}
    specs = block_specs(config, "BF16")
    assert {name: spec.shape for name, spec in specs.items()} == {name: shape for name, (_, shape) in found.items()}
    assert {n for n, spec in specs.items() if spec.dtype != found[n][0]} <= {n for n in found if "correction_bias" in n}


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("server", SERVERS, ids=str)
def test_a_worker_takes_the_scales_of_the_blocks_that_it_takes(family: str, server: ServerSizes) -> None:
    if server.ep and family == "qwen3":
        pytest.skip("has no experts")
    config = fp8_config(family)
    specs = {name: spec for name, spec in block_specs(config, "BF16").items()}
    taken: set[str] = set()
    for worker in range(server.workers):
        recording = worker_recording(config, specs, server, worker, dtype="bfloat16")
        assert (recording.unwritten, recording.unfit) == ({}, {})
        assert set(recording.impure) <= {name for name in specs if "correction_bias" in name}
        taken |= recording.needs.keys()
        for name, boxes in recording.needs.items():
            if specs[name].dtype == "F8_E4M3":
                scales = {tuple((r.start, r.count) for r in box) for box in recording.needs[f"{name}_scale_inv"]}
                assert scales == {tuple((r.start // BLOCK, -(-r.count // BLOCK)) for r in box) for box in boxes}, name
    assert taken == specs.keys()


def test_blocks_that_tensor_parallelism_divides_are_refused_by_check_with_vllms_own_words() -> None:
    config = fp8_config("qwen3", intermediate_size=640)
    assert check(config, server=ServerSizes()).receives is not None
    with pytest.raises(UnsupportedModel, match=r"vLLM refuses this: ValueError: .*not divisible by weight quantization block"):
        check(config, server=ServerSizes(tp=2))


def test_check_takes_the_config_of_an_fp8_checkpoint_for_the_server_alone() -> None:
    with pytest.raises(UsageError, match="check the server alone"):
        check(fp8_config("qwen3"), parallel(1, 1, 1, 0, 1, 1, 0), ServerSizes())
    with pytest.raises(UnsupportedModel, match="got awq"):
        check(fp8_config("qwen3") | {"quantization_config": {"quant_method": "awq"}}, server=ServerSizes())
