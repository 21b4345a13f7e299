"""Megatron-Bridge's own Qwen3-VL, with an image in the prompt, against transformers on the checkpoint that filled it."""

from pathlib import Path

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.bridge_lora import needs_bridge
from tests.support.megatron_models import build_model

# isort: split
import torch
from resharder.converters.errors import LayoutError
from resharder.converters.geometry.layout import box_index
from resharder.converters.models.megatron.layout import local_layout
from resharder.converters.models.tensor_io import write_piece

from tests.support import bridge_vision

pytestmark = [pytest.mark.slow, needs_bridge]
FAMILY = "qwen3_vl"


@torch.no_grad()
def test_bridge_computes_an_image_as_transformers_does(tmp_path: Path) -> None:
    config = tiny_hf.tiny_config(FAMILY)
    folder = tiny_hf.save_checkpoint(tmp_path, config)
    fakepg.enter(0, 1)
    model = bridge_vision.build(config, tp=1)
    layout, tensors = local_layout([model], config)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    checkpoint = tiny_hf.load_checkpoint(folder)
    for piece in layout.pieces:
        write_piece(tensors, piece, checkpoint[piece.tensor][box_index(piece.box)])
    model.language_model.embedding.word_embeddings.weight.nan_to_num_()
    model.language_model.output_layer.weight.nan_to_num_()
    given = bridge_vision.image(config)
    there = tiny_hf.load_model(folder)
    kinds = (given.tokens == config["image_token_id"]).int()
    expected = there(given.tokens, pixel_values=given.pixels, image_grid_thw=given.grid, mm_token_type_ids=kinds).logits
    for merger in (module for module in model.modules() if "PatchMerger" in type(module).__name__):
        merger.activation_func = torch.nn.functional.gelu  # Bridge 0.6.2 approximates it by tanh there, transformers does not
    found = model(given.tokens, pixel_values=given.pixels, image_grid_thw=given.grid, position_ids=None, attention_mask=None)
    assert torch.allclose(found[..., : expected.shape[-1]], expected, atol=2e-5)


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
        ("vision_config", {"num_heads": 4}, "of the tower num_attention_heads is 4 in the config"),
        ("vision_config", {"depth": 4}, "of the tower num_hidden_layers is 4 in the config"),
        ("vision_config", {"hidden_act": "silu"}, "of the tower hidden_act is .silu. in the config"),
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
