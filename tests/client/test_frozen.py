"""A language model that is trained without its tower, which is published from a base checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model, fill_from_hf

# isort: split
import torch
from resharder.client import UsageError, connect
from resharder.client.trainer.frozen import with_tower
from resharder.converters.architectures.checkpoint import tower_shapes
from resharder.converters.architectures.wrapped import language_config
from resharder.converters.errors import ConversionError, LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.models import local_layout
from transformers import AutoConfig, AutoModelForCausalLM

from tests.client.models import exported
from tests.support.daemon import Daemon
from tests.support.variants import sampled

Config = dict[str, Any]


def language_alone(family: str, folder: Path) -> tuple[Config, Config, dict[str, torch.Tensor]]:
    """The config of a model with a tower, that of its language model by itself, and the base checkpoint in a folder."""
    config = tiny_hf.tiny_config(family)
    return config, dict(language_config(config)), tiny_hf.load_checkpoint(tiny_hf.save_checkpoint(folder, config, seed=1))


@pytest.mark.parametrize("family", sampled(tiny_hf.WRAPPED, ["qwen3_vl", "qwen3_5_moe_vl"]))
def test_a_version_has_the_trained_language_model_and_the_tower_of_the_base(daemon: Daemon, family: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "trained").mkdir()
    config, _, base = language_alone(family, tmp_path / "base")
    trained = tiny_hf.load_checkpoint(tiny_hf.save_checkpoint(tmp_path / "trained", config, seed=2))
    experts = {"ep": 2} if any(".experts" in name for name in trained) else {}
    publishers = []
    for rank in range(4):
        fakepg.enter(rank, 4)
        chunks = [chunk.language_model for chunk in build_model(config, spec="te", tp=2, pp=2, **experts)]
        fill_from_hf(chunks, config, trained)
        publishers.append(connect(daemon.endpoint, model=f"{family}-frozen", job="frozen", rank=rank, world_size=4))
        publishers[-1].attach(chunks, config, frozen=tmp_path / "base", wait=False)
    handle, *_ = [publisher.publish(1) for publisher in publishers]
    handle.wait_ready(60)
    published = exported(daemon.endpoint, handle.name, tmp_path / "out")
    tower = tower_shapes(config)
    assert published.keys() == trained.keys()
    assert tower
    for name, tensor in published.items():
        assert torch.equal(tensor, (base if name in tower else trained)[name]), name


def test_transformers_language_model_is_published_under_the_names_of_its_wrapper(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    config, text, base = language_alone("qwen3_5_vl", tmp_path / "base")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text))
    with connect(daemon.endpoint, model="text-frozen") as publisher:
        publisher.attach(model, config, frozen=str(tmp_path / "base"))
        handle = publisher.publish(1)
        handle.wait_ready(60)
    published = exported(daemon.endpoint, handle.name, tmp_path / "out")
    assert published.keys() == base.keys()
    state = model.state_dict()
    for name, tensor in published.items():
        there = name.replace("model.language_model.", "model.")
        assert torch.equal(tensor, base[name] if there not in state else state[there]), name


def test_a_language_model_without_a_tower_is_refused_by_what_to_pass(tmp_path: Path) -> None:
    config, _, _ = language_alone("qwen3_vl", tmp_path)
    fakepg.enter(0, 1)
    whole = build_model(config)
    chunks = [chunk.language_model for chunk in whole]
    with pytest.raises(
        UnsupportedModel, match=r"the model is its language model alone: pass the base checkpoint, .*frozen=FOLDER"
    ):
        local_layout(chunks, config, tower=True)
    with pytest.raises(UnsupportedModel, match="this model has a tower: leave frozen out"):
        local_layout(whole, config, tower=False)
    model = tiny_hf.load_model(tmp_path)
    with pytest.raises(UnsupportedModel, match="this model has a tower: leave frozen out"):
        local_layout(model, config, tower=False)
    with pytest.raises(LayoutError, match=r"rms_norm_eps is 0\.5 in the config"):
        local_layout(chunks, config | {"text_config": config["text_config"] | {"rms_norm_eps": 0.5}})


def test_a_base_without_the_tower_is_refused_by_name(tmp_path: Path) -> None:
    config, _, base = language_alone("qwen3_vl", tmp_path)
    fakepg.enter(0, 1)
    chunks = [chunk.language_model for chunk in build_model(config)]
    layout, tensors = local_layout(chunks, config, tower=False)
    other = config | {"vision_config": config["vision_config"] | {"depth": 4}}
    with pytest.raises(UnknownTensor, match=r"lacks 12 of the tower's .* such as model.visual.blocks.3.*as frozen"):
        with_tower(layout, tensors, other, tmp_path)
    other = config | {"vision_config": config["vision_config"] | {"num_position_embeddings": 25}}
    with pytest.raises(LayoutError, match=r"pos_embed.weight: expected \[25, 64\] from the config"):
        with_tower(layout, tensors, other, tmp_path)
    with pytest.raises((UsageError, ConversionError)):
        with_tower(layout, tensors, config, tmp_path / "nowhere")
    plain = tiny_hf.tiny_config("qwen3")
    with pytest.raises(UsageError, match=r"frozen is for models with a tower, and 'qwen3' has none: leave frozen out"):
        with_tower(layout, tensors, plain, tmp_path)
    assert base
