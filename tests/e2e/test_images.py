"""An image in the prompt: a vLLM server that follows versions, a server that loads the exported folder, and transformers."""

from pathlib import Path
from typing import Any

import pytest
from resharder.client import connect

from tests.support.daemon import Daemon
from tests.support.observing import export, wait_serving
from tests.support.tiny_hf import tiny_config
from tests.support.variants import sampled
from tests.support.vision_models import VisionReference, ask, image_part, picture, save_processor, vision_server
from tests.support.weights import random_weights

TOLERANCE = 1e-4
PICTURE = picture(0)


@pytest.mark.parametrize(("family", "tp"), sampled([("qwen3_vl", 1), ("qwen3_vl", 2), ("qwen2_5_vl", 2)], [("qwen3_vl", 1)]))
def test_after_an_install_an_image_is_answered_as_by_a_fresh_server_and_by_transformers(
    family: str, tp: int, tmp_path: Path
) -> None:
    """The same image in every prompt: what the tower made of it under the version before is in the engine's encoder cache."""
    config = tiny_config(family, num_hidden_layers=2)
    model = save_processor(tmp_path / "model", config)
    options = ["--tensor-parallel-size", str(tp)]
    files: dict[str, Any] = {"config": config, "tokenizer": model}
    with Daemon() as daemon, connect(daemon.endpoint, model="policy", job="j", rank=0, world_size=1, **files) as publisher:
        publisher.publish_tensors(1, random_weights(config, 1).items()).wait_ready(60)
        with vision_server(model, daemon.endpoint, *options) as followed:
            said = {1: ask(followed, image_part(PICTURE))}
            for version in (2, 3):
                publisher.publish_tensors(version, random_weights(config, version).items()).wait_serving(120)
                wait_serving(daemon, version)
                said[version] = ask(followed, image_part(PICTURE))
            text = ask(followed)
        for version in said:
            export(daemon, f"models/policy/versions/{version}", tmp_path / f"exported-{version}")
    assert [each.version for each in (*said.values(), text)] == ["1", "2", "3", "3"]
    for version, answer in said.items():
        wanted = VisionReference(tmp_path / f"exported-{version}").logprobs(answer, PICTURE)
        assert answer.logprobs == pytest.approx(wanted, abs=TOLERANCE)
    with vision_server(tmp_path / "exported-3", None, *options) as fresh:
        assert [ask(fresh, image_part(PICTURE)).content, ask(fresh).content] == [said[3].content, text.content]
    assert said[2].content != said[3].content != text.content
