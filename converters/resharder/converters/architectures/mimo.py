"""MiMo: Qwen2 with layers that predict further tokens, under HF names of its own."""

from resharder.converters.architectures import qwen2
from resharder.converters.architectures.blocks import Sizes, attention, dense_mlp, integer, placed
from resharder.converters.architectures.mtp import further_tokens, prediction
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Rows, Table, Weight


def table(config: HFConfig) -> Table:
    """Return Qwen2's layers and MTP layers under `model.mtp_layers.*`."""
    size, found = Sizes.of(config), dict(qwen2.table(config))
    layer = attention(size, qkv_bias=True) | dense_mlp(size, integer(config, "intermediate_size"))
    # HF has the hidden state's columns first, Megatron the embedding's
    halves = (Rows(0, size.hidden, "input_proj.weight", size.hidden), Rows(size.hidden, size.hidden, "input_proj.weight"))
    projection = Weight((size.hidden, 2 * size.hidden), halves, axis=1)
    part = prediction("token_layernorm", "hidden_layernorm", "final_layernorm", projection, size, layer)
    for k in range(further_tokens(config)):
        found |= placed(part, f"mtp.layers.{k}.", f"model.mtp_layers.{k}.")
    return found


def recipe(config: HFConfig) -> Recipe:
    """Return Qwen2's recipe with the number of MTP layers."""
    return qwen2.recipe(config).but(mtp_num_layers=further_tokens(config) or None)
