"""Nemotron: an MLP with squared ReLU and no gate, LayerNorm with gains stored around zero, and half of each head rotated."""

from dataclasses import replace

from resharder.converters.architectures.blocks import Sizes, attention, before_mlp, decoder, integer, refuse, whole
from resharder.converters.architectures.recipe import Recipe, decoder_recipe, partial_rotary
from resharder.converters.architectures.table import HFConfig, Rows, Table, Weight


def table(config: HFConfig) -> Table:
    """Return attention, the MLP and the bias of every norm."""
    refuse(config, "attention_bias", "mlp_bias")
    size, ffn = Sizes.of(config, gain=0.0), integer(config, "intermediate_size")
    mlp = {
        "mlp.linear_fc1.weight": (whole("mlp.up_proj.weight", ffn, size.hidden),),
        "mlp.linear_fc2.weight": (whole("mlp.down_proj.weight", size.hidden, ffn),),
    }
    layer = attention(size) | before_mlp(size) | mlp
    gains = decoder(size, lambda n: layer)
    return dict(gains) | {bias_of(key): (norm_bias(*weights),) for key, weights in gains.items() if weights[0].gain is not None}


def norm_bias(gain: Weight) -> Weight:
    """Return the bias that belongs to the gain of a norm."""
    return replace(gain, gain=None, runs=tuple(Rows(run.at, run.count, bias_of(run.tensor)) for run in gain.runs))


def bias_of(name: str) -> str:
    """Return the name of the bias beside a `weight`."""
    return name.removesuffix("weight") + "bias"


def recipe(config: HFConfig) -> Recipe:
    """Return a decoder's recipe with LayerNorm, squared ReLU and partly rotated heads."""
    built = decoder_recipe(
        {"hidden_act": "relu2", **config},
        normalization="LayerNorm",
        layernorm_epsilon=config.get("norm_eps", 1e-5),
        layernorm_zero_centered_gamma=True,
        gated_linear_unit=False,
    )
    return built.but(partial_rotary(config, 0.5))
