"""What is special to GPT-OSS, Qwen3-Next and Qwen3.5: layers that predict further tokens under `mtp.*`, norms that differ by one,
values that only float32 holds."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model, fill_from_hf, logits, wrap_float16
from tests.support.megatron_rebuild import assert_rebuilt, rebuild

# isort: split
from resharder.client.trainer.rank_layout import LiveTensors
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import UnsupportedModel
from resharder.converters.geometry.layout import Layout
from resharder.converters.models.megatron.layout import local_layout, local_pieces
from resharder.converters.models.tensor_io import read_piece

pytestmark = pytest.mark.compat("layouts")

HYBRIDS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = tiny_hf.save_checkpoint(tmp_path_factory.mktemp(family), tiny_hf.tiny_config(family))
        return made[family]

    return folder


# Layers that predict further tokens

MTP_KEY = {"qwen3_next": "num_nextn_predict_layers", "qwen3_5": "mtp_num_hidden_layers", "qwen3_5_moe": "mtp_num_hidden_layers"}
# As vLLM 0.32 loads published checkpoints: `mtp.` and the names of its modules (model_executor/models/qwen3_next_mtp.py and
# qwen3_5_mtp.py).
OUTSIDE_THE_LAYER = {"mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"}
ATTENTION = {f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight"}
DENSE = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


def mtp_config(family: str) -> dict[str, Any]:
    return tiny_hf.tiny_config(family) | {MTP_KEY[family]: 1}


def with_mtp(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint, and random tensors for its MTP layer, whose decoder layer is made like the last one."""
    checkpoint, generator = tiny_hf.load_checkpoint(folder), torch.Generator().manual_seed(3)
    hidden = checkpoint["model.norm.weight"].numel()
    shapes = {name: (hidden, 2 * hidden) if name == "mtp.fc.weight" else (hidden,) for name in sorted(OUTSIDE_THE_LAYER)}
    for name, tensor in checkpoint.items():
        if name.startswith("model.layers.3."):
            shapes["mtp.layers.0." + name.removeprefix("model.layers.3.")] = tuple(tensor.shape)
    return checkpoint | {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def test_the_names_of_mtp_are_those_of_published_checkpoints() -> None:
    mtp = {name for name in expected_shapes(mtp_config("qwen3_5")) if name.startswith("mtp.")}
    assert mtp == OUTSIDE_THE_LAYER | {f"mtp.layers.0.{name}" for name in ATTENTION | NORMS | DENSE}


@pytest.mark.parametrize("family", HYBRIDS)
def test_an_mtp_layer_has_the_shapes_of_a_full_attention_layer(saved: Callable[[str], Path], family: str) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in with_mtp(family, saved(family)).items()}
    assert expected_shapes(mtp_config(family)) == expected


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        ("qwen3_next", 4, {"tp": 2, "pp": 2, "ep": 2}),
        ("qwen3_5", 4, {"tp": 2, "pp": 2}),
        ("qwen3_5", 4, {"tp": 4}),
    ],
)
def test_all_ranks_give_every_element_of_mtp_once(
    saved: Callable[[str], Path], family: str, world: int, layout: dict[str, Any]
) -> None:
    model = mtp_config(family), with_mtp(family, saved(family))
    assert_rebuilt(model, rebuild(model, world, spec="te", **layout))


@torch.no_grad()
def mtp_logits(family: str, folder: Path, scratch: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Of the token after the next, from transformers' modules, in the order of vLLM's qwen3_next_mtp.py. To read the MTP layer,
    transformers gets a copy of the checkpoint that has it in the place of the last layer."""
    checkpoint = with_mtp(family, folder)
    twin = {name: checkpoint.get(name.replace("model.layers.3.", "mtp.layers.0."), tensor) for name, tensor in checkpoint.items()}
    save_file({name: tensor for name, tensor in twin.items() if not name.startswith("mtp.")}, scratch / "model.safetensors")
    (scratch / "config.json").write_text((folder / "config.json").read_text())
    model, layer = tiny_hf.load_model(folder).model, tiny_hf.load_model(scratch).model.layers[3]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        module = deepcopy(model.norm)
        module.weight.copy_(checkpoint[f"mtp.{name}.weight"])
        return module(x)

    positions = torch.arange(tokens.shape[1])[None]
    following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
    embedding = norm("pre_fc_norm_embedding", model.embed_tokens(following))
    hidden = norm("pre_fc_norm_hidden", model(tokens).last_hidden_state)
    joined = torch.cat([embedding, hidden], -1) @ checkpoint["mtp.fc.weight"].T
    future = torch.full((len(positions[0]),) * 2, float("-inf")).triu(1)[None, None]
    result = layer(joined, position_embeddings=model.rotary_emb(joined, positions), attention_mask=future)
    return norm("norm", result) @ checkpoint["lm_head.weight"].T


@pytest.mark.parametrize("family", HYBRIDS)
def test_megatron_predicts_the_token_after_the_next_as_the_checkpoint_does(
    saved: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    tokens = torch.randint(0, 1003, (2, 24), generator=torch.Generator().manual_seed(5))
    expected = mtp_logits(family, saved(family), tmp_path, tokens)

    def difference(checkpoint: dict[str, torch.Tensor]) -> float:
        fakepg.enter(0, 1)
        chunks = build_model(mtp_config(family), spec="te")
        fill_from_hf(chunks, mtp_config(family), checkpoint)
        found = logits(chunks, mtp_config(family), tokens, depth=1)
        assert found is not None
        return float((found - expected)[:, :-1].abs().max())

    checkpoint = with_mtp(family, saved(family))
    assert difference(checkpoint) < tiny_hf.tolerance(family)
    one, other = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"
    assert difference(checkpoint | {one: checkpoint[other], other: checkpoint[one]}) > 0.01


def test_several_mtp_layers_are_refused_since_they_share_one_projection() -> None:
    with pytest.raises(UnsupportedModel, match="at most one MTP layer, got 2"):
        expected_shapes(mtp_config("qwen3_5") | {"mtp_num_hidden_layers": 2})


# What is refused


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt_oss", {"attention_bias": False}, "attention_bias=False"),
        ("qwen3_next", {"linear_num_value_heads": 10}, "10 linear value heads do not divide into 4"),
        ("qwen3_next", {"linear_key_head_dim": None}, "linear_key_head_dim should be a positive integer"),
        ("qwen3_5", {"layer_types": ["linear_attention"]}, "expected 4 layer_types, one for each layer, got 1"),
    ],
)
def test_a_config_without_a_meaning_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        expected_shapes(tiny_hf.tiny_config(family) | change)


def test_published_configs_say_which_layers_are_full_attention_by_an_interval() -> None:
    config = tiny_hf.tiny_config("qwen3_next")
    assert expected_shapes(config | {"layer_types": None, "full_attention_interval": 4}) == expected_shapes(config)
    assert expected_shapes(config | {"layer_types": None, "full_attention_interval": 2}) != expected_shapes(config)


# Values that differ by one


def test_a_bf16_norm_of_a_delta_net_is_rounded_once_and_the_same_at_every_publish() -> None:
    config = tiny_hf.tiny_config("qwen3_5")
    fakepg.enter(0, 1)
    chunks = build_model(config, spec="te", dtype=torch.bfloat16)
    layout, tensors = local_layout(chunks, config)
    gamma = torch.randn(config["linear_value_head_dim"], generator=torch.Generator().manual_seed(2)) / 1000
    name = "model.layers.0.linear_attn.norm.weight"
    (piece,) = [piece for piece in layout.pieces if piece.tensor == name]
    tensors[piece.local].data.copy_(gamma)
    exact = 1 + tensors[piece.local].detach().double()
    assert layout.tensors[name].dtype == "BF16"
    first, again = read_piece(tensors, piece), read_piece(tensors, piece)
    assert torch.equal(first, again)
    assert torch.equal(first, exact.to(torch.bfloat16))
    assert not torch.equal(first.double(), exact)  # a gain of 1 + 0.0005 is none that bf16 holds


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_bf16_checkpoint_comes_back_as_it_was(saved: Callable[[str], Path], family: str) -> None:
    config = tiny_hf.tiny_config(family)
    checkpoint = {name: tensor.bfloat16() for name, tensor in tiny_hf.load_checkpoint(saved(family)).items()}
    fakepg.enter(0, 1)
    chunks = build_model(config, spec="te", dtype=torch.bfloat16)
    fill_from_hf(chunks, config, checkpoint)
    wrong = {name for name, index, tensor in local_pieces(chunks, config) if not torch.equal(tensor, checkpoint[name][index])}
    assert wrong == set()


# Values that bf16 cannot hold


def fine(count: int, offset: float = 0.0) -> torch.Tensor:
    """Values that differ in bits that bf16 has not."""
    return 1 + torch.arange(count) / 4096 + offset


def read(layout: Layout, tensors: Any, name: str) -> torch.Tensor:
    """The values that this rank would publish, in the order of its pieces."""
    return torch.cat([read_piece(tensors, piece) for piece in layout.pieces if piece.tensor == name])


class Wrapped:
    """A model in Float16Module whose routers have an expert_bias."""

    def __init__(self) -> None:
        fakepg.enter(0, 1)
        self.config = tiny_hf.tiny_config("deepseek_v3")
        self.chunks = wrap_float16(build_model(self.config, dtype=torch.bfloat16, spec="te"))
        for parameter in self.chunks[0].parameters():
            parameter.data.fill_(0.01)
        self.bias = "model.layers.1.mlp.gate.e_score_correction_bias"

    @property
    def router(self) -> Any:
        return self.chunks[0].module.decoder.layers[1].mlp.router  # type: ignore[union-attr]

    def lay_out(self) -> tuple[Layout, Any]:
        return local_layout(self.chunks, self.config)

    def load(self, values: torch.Tensor) -> None:
        self.router.load_state_dict(self.router.state_dict() | {"expert_bias": values})

    def forward(self) -> None:
        assert logits(self.chunks, self.config, torch.arange(8)[None]) is not None


def test_an_expert_bias_is_float32_before_the_first_forward_and_ever_after() -> None:
    model = Wrapped()
    assert model.router.expert_bias.dtype == torch.bfloat16  # Float16Module's doing
    layout, tensors = model.lay_out()
    assert layout.tensors[model.bias].dtype == "F32"
    for step in ("load", "forward", "update"):
        if step == "load":
            model.load(fine(8))
        elif step == "forward":
            model.forward()
        else:
            model.router.expert_bias.add_(1 / 4096)  # as megatron-core does after a step, in place
        later, tensors_later = model.lay_out()
        assert later == layout
        expected = fine(8, 1 / 4096 if step == "update" else 0.0)
        assert torch.equal(read(layout, tensors, model.bias), expected)
        assert torch.equal(read(later, tensors_later, model.bias), expected)


def test_a_bias_set_between_wrapping_and_the_first_layout_is_read_as_it_was_set() -> None:
    model = Wrapped()
    model.load(fine(8))
    layout, tensors = model.lay_out()
    assert torch.equal(read(layout, tensors, model.bias), fine(8))


@pytest.mark.parametrize(
    "move",
    [lambda module: module._apply(lambda tensor: tensor.clone()), lambda module: module.bfloat16()],
    ids=["moved", "cast"],
)
def test_a_buffer_that_its_module_replaced_is_read_where_it_is_now(move: Callable[[Any], Any]) -> None:
    model = Wrapped()
    layout, tensors = model.lay_out()
    live = LiveTensors(layout, tensors)
    held = model.router.expert_bias
    move(model.chunks[0].module)
    assert model.router.expert_bias is not held
    model.load(fine(8, 2.0))
    (position,) = [n for n, piece in enumerate(layout.pieces) if piece.tensor == model.bias]
    assert [torch.equal(tensor, fine(8, 2.0)) for _, tensor in live.items([position])] == [True]


def test_decays_that_a_trainer_keeps_in_float32_are_published_so() -> None:
    config = tiny_hf.tiny_config("qwen3_5")
    fakepg.enter(0, 1)
    chunks = wrap_float16(build_model(config, spec="te", dtype=torch.bfloat16))
    for parameter in chunks[0].parameters():
        parameter.data.fill_(0.01)
    net: Any = chunks[0].module.decoder.layers[0].self_attention  # type: ignore[union-attr]
    net.A_log.data, net.dt_bias.data = fine(12), fine(12, 1.0)
    layout, tensors = local_layout(chunks, config)
    assert logits(chunks, config, torch.arange(8)[None]) is not None
    assert local_layout(chunks, config)[0] == layout
    for name, values in (("A_log", fine(12)), ("dt_bias", fine(12, 1.0))):
        assert layout.tensors[f"model.layers.0.linear_attn.{name}"].dtype == "F32"
        assert layout.tensors[f"model.layers.1.linear_attn.{name}"].dtype == "BF16"
        assert torch.equal(read(layout, tensors, f"model.layers.0.linear_attn.{name}"), values)
