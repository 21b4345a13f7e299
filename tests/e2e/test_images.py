"""An image in the prompt: a vLLM server that follows versions, a server that loads the exported folder, and transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client import connect

from tests.support.daemon import Daemon
from tests.support.observing import export, wait_serving
from tests.support.tensor_hashes import differing, hashes, new_socket
from tests.support.tiny_hf import WRAPPED, tiny_config
from tests.support.variants import sampled
from tests.support.vision_models import Said, VisionReference, ask, image_part, picture, save_processor, video_part, vision_server
from tests.support.vllm_models import config_with_images
from tests.support.weights import random_weights

NEAR, FAR = {"float32": 1e-5, "bfloat16": 0.2}, {"float32": 1e-2, "bfloat16": 0.3}
"""An answer's log-probabilities are on average nearer to transformers' in float32 with its own image than the first, farther
with another than the second. vLLM's CPU kernels for delta nets take bfloat16 alone."""
PICTURE = picture(0)
EACH = 1e-4
"""Bound of each log-probability in float32."""
FAMILIES = tuple(family for family in WRAPPED if family != "qwen3_vl")
CASES = [("qwen3_vl", 1), ("qwen3_vl", 2), *((family, tp) for family in FAMILIES for tp in (1, 2))]


@pytest.mark.parametrize(("family", "tp"), sampled(CASES, CASES[:1]))
def test_after_an_install_an_image_is_answered_as_by_a_fresh_server_and_by_transformers(
    family: str, tp: int, tmp_path: Path
) -> None:
    """The same image in every prompt: what the tower made of it under the version before is in the engine's encoder cache."""
    config = config_with_images(family)
    model = save_processor(tmp_path / "model", config)
    dtype = getattr(torch, config["dtype"])
    size = (16, 16) if family == "gemma3_vl" else (24, 32)  # its processor makes squares of images
    image, other = picture(0, *size), picture(1, *size)
    options = ["--tensor-parallel-size", str(tp)]
    # Kimi-K2.5's processor imports numba. A worker that is forked afterwards dies in vLLM's search for Triton kernels.
    settings: dict[str, Any] = {"dtype": config["dtype"], "env": {"SPAWNED": "1"} if family == "kimi_k25" else {}}
    files: dict[str, Any] = {"config": config, "tokenizer": model}
    with Daemon() as daemon, connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, **files) as publisher:
        publisher.publish_tensors(1, random_weights(config, 1, dtype).items()).wait_ready(60)
        with vision_server(model, daemon.endpoint, *options, **settings) as followed:
            said = {1: ask(followed, image_part(image))}
            for version in (2, 3):
                publisher.publish_tensors(version, random_weights(config, version, dtype).items()).wait_serving(120)
                wait_serving(daemon, version)
                said[version] = ask(followed, image_part(image))
            text = ask(followed)
        for version in said:
            export(daemon, f"models/policy/versions/{version}", tmp_path / f"exported-{version}")
    assert [each.version for each in (*said.values(), text)] == ["1", "2", "3", "3"]
    for version, answer in said.items():
        reference = VisionReference(tmp_path / f"exported-{version}")
        wanted = reference.logprobs(answer, image)
        assert distance(answer, wanted) < NEAR[config["dtype"]]
        assert answer.logprobs == pytest.approx(wanted, abs=EACH) or config["dtype"] == "bfloat16"
        assert distance(answer, reference.logprobs(answer, other)) > FAR[config["dtype"]]
    with vision_server(tmp_path / "exported-3", None, *options, **settings) as fresh:
        assert [ask(fresh, image_part(image)).content, ask(fresh).content] == [said[3].content, text.content]
    assert said[2].content != said[3].content != text.content


def distance(answer: Said, wanted: Sequence[float]) -> float:
    """Between log-probabilities, on average."""
    return sum(abs(one - other) for one, other in zip(answer.logprobs, wanted, strict=True)) / len(wanted)


@pytest.mark.full
def test_where_each_worker_has_the_whole_tower_images_and_videos_are_answered_as_by_a_fresh_server(tmp_path: Path) -> None:
    """Encoder data parallelism: the language model is divided over the workers, and the images of a batch are."""
    config = tiny_config("qwen3_vl", num_hidden_layers=2)
    model = save_processor(tmp_path / "model", config)
    options = ["--tensor-parallel-size", "2", "--mm-encoder-tp-mode", "data"]
    sockets = [new_socket(), new_socket()]
    files: dict[str, Any] = {"config": config, "tokenizer": model}
    video = video_part([picture(seed) for seed in range(4)])
    prompts = [[image_part(PICTURE)], [video], [image_part(picture(7)), image_part(PICTURE)]]
    with Daemon() as daemon, connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, **files) as publisher:
        publisher.publish_tensors(1, random_weights(config, 1).items()).wait_ready(60)
        hashed: dict[str, Any] = {"plugins": ",raw_mode,tensor_hashes", "env": {"TENSOR_HASHES": sockets[0]}}
        with vision_server(model, daemon.endpoint, *options, **hashed) as followed:
            before = [ask(followed, *parts) for parts in prompts]
            publisher.publish_tensors(2, random_weights(config, 2).items()).wait_serving(120)
            wait_serving(daemon, 2)
            after = [ask(followed, *parts) for parts in prompts]
            held = hashes(sockets[0], workers=2)
        export(daemon, "models/policy/versions/2", tmp_path / "exported")
    with vision_server(tmp_path / "exported", None, *options, **hashed | {"env": {"TENSOR_HASHES": sockets[1]}}) as fresh:
        assert differing(held, hashes(sockets[1], workers=2)) == []
        assert [ask(fresh, *parts).content for parts in prompts] == [each.content for each in after]
    towers = [{name: found for name, found in worker.items() if "visual" in name} for worker in held]
    assert towers[0] == towers[1] != {}, "each worker has the whole tower"
    wanted = VisionReference(tmp_path / "exported").logprobs(after[0], PICTURE)
    assert distance(after[0], wanted) < NEAR["float32"]
    assert after[0].logprobs == pytest.approx(wanted, abs=EACH)
    assert config["video_token_id"] in after[1].prompt
    assert len({each.content for each in (*before, *after)}) == 6
