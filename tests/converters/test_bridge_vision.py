"""Megatron-Bridge's own Qwen3-VL, with an image in the prompt, against transformers on the checkpoint that filled it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.bridge_lora import needs_bridge
from tests.support.megatron_models import build_model

# isort: split
import torch
from resharder.converters import architectures
from resharder.converters.architectures.table import Weight
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import box_index
from resharder.converters.models.megatron import layout as layouts
from resharder.converters.models.megatron.layout import local_layout
from resharder.converters.models.tensor_io import write_piece

from tests.support import bridge_vision
from tests.support.pictures import image
from tests.support.wrong_tables import exchanged, renamed, rewritten

pytestmark = [pytest.mark.slow, needs_bridge]
FAMILY = "qwen3_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf.save_checkpoint(tmp_path_factory.mktemp(FAMILY), tiny_hf.tiny_config(FAMILY))


@torch.no_grad()
def difference(folder: Path) -> float:
    """The largest difference of a logit to transformers', with an image in the prompt."""
    config = tiny_hf.tiny_config(FAMILY)
    fakepg.enter(0, 1)
    model: Any = bridge_vision.build(config, tp=1)
    layout, tensors = local_layout([model], config)
    for name, tensor in tensors.items():
        tensor.fill_(0.0 if "word_embeddings" in name or "output_layer" in name else float("nan"))  # these two have padding
    checkpoint = tiny_hf.load_checkpoint(folder)
    for piece in layout.pieces:
        write_piece(tensors, piece, checkpoint[piece.tensor][box_index(piece.box)])
    for merger in (module for module in model.modules() if "PatchMerger" in type(module).__name__):
        merger.activation_func = torch.nn.functional.gelu  # Bridge 0.6.2 approximates it by tanh there, transformers does not
    given, there = image(config), tiny_hf.load_model(folder)
    images = {"pixel_values": given.pixels, "image_grid_thw": given.grid}
    expected = there(given.tokens, mm_token_type_ids=(given.tokens == config["image_token_id"]).int(), **images).logits
    found = model(given.tokens, position_ids=None, attention_mask=None, **images)[..., : expected.shape[-1]]
    return float((found - expected).abs().max())


def test_bridge_computes_an_image_as_transformers_does(folder: Path) -> None:
    assert difference(folder) < tiny_hf.tolerance(FAMILY)


WRONG: dict[str, tuple[str, Callable[[Weight], Weight]]] = {
    "key and value of the tower swapped": ("vision_model.decoder.layers.0.self_attention.linear_qkv.weight", exchanged(1, 2)),
    "heads of the tower swapped": ("vision_model.decoder.layers.1.self_attention.linear_qkv.bias", exchanged(0, 3)),
    "norms of the tower swapped": ("vision_model.decoder.layers.0.mlp.linear_fc1.layer_norm_weight", renamed("norm2", "norm1")),
    "deepstack mergers swapped": (
        "deepstack_merger_list.0.linear_fc1.weight",
        renamed("deepstack_merger_list.0", "deepstack_merger_list.1"),
    ),
    "a deepstack merger taken for the last one": (
        "vision_model.merger.linear_fc2.bias",
        renamed("merger", "deepstack_merger_list.0"),
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_line_of_the_tower_moves_the_logits(mistake: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, change = WRONG[mistake]
    right = architectures.architecture_of(tiny_hf.tiny_config(FAMILY))
    wrong = replace(right, table=lambda config: rewritten(right.table(config), key, change))
    monkeypatch.setattr(architectures, "ARCHITECTURES", (wrong,))
    monkeypatch.setattr(layouts, "_refuse_part_of_tower", lambda *given: None)
    assert difference(folder) > 0.001


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_rank_has_the_pieces_that_our_own_model_has(tp: int) -> None:
    config = tiny_hf.tiny_config(FAMILY, num_key_value_heads=8)
    for rank in range(tp):
        fakepg.enter(rank, tp)
        layout, _ = local_layout([bridge_vision.build(config, tp)], config)
        ours, _ = local_layout(build_model(config, tp=tp, spec="te", vocab_multiple=128), config)
        assert (layout.tensors, {*layout.pieces}) == (ours.tensors, {*ours.pieces})


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0 in the config"),
        ("text_config", {"rope_parameters": {"mrope_section": [4, 6, 6]}}, r"mrope_section is \[4, 6, 6\] in the config"),
        ("vision_config", {"num_heads": 4}, "the tower's num_attention_heads is 4 in the config"),
        ("vision_config", {"depth": 4}, "the tower's num_hidden_layers is 4 in the config"),
        ("vision_config", {"hidden_act": "silu"}, "the tower's hidden_act is .silu. in the config"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 2]}, "the model's lacks 6 of them"),
    ],
)
def test_a_config_of_another_model_is_refused_by_both_values(part: str, change: dict[str, object], message: str) -> None:
    config = tiny_hf.tiny_config(FAMILY)
    fakepg.enter(0, 1)
    model = bridge_vision.build(config, tp=1)
    there = dict(config[part])
    for name, value in change.items():
        there[name] = there[name] | value if isinstance(value, dict) else value
    with pytest.raises(LayoutError, match=message):
        local_layout([model], config | {part: there})
