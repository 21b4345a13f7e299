"""Building blocks of tables that decoder families share. Names inside a layer are relative to the
layer, in Megatron and in HF.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from resharder.converters.architectures.table import HFConfig, Rows, Table, Weight
from resharder.converters.errors import LayoutError, UnsupportedModel

Layer = dict[str, tuple[Weight, ...]]

# Norms before attention and MLP have two names. Megatron's local spec has separate norms, but stores them under the names of
# TransformerEngine's fused modules; TransformerEngine has other names for norms that are not fused, such as those before experts.
BEFORE_ATTENTION = ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
BEFORE_MLP = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")

# megatron-core 0.16.1 has no norms after attention and MLP. In Megatron-Bridge they are parts of the linears; in Megatron-LM
# after 0.16 and in slime's fork, parts of the layer.
AFTER_ATTENTION = ("self_attention.linear_proj.post_layernorm.weight", "post_self_attn_layernorm.weight")
AFTER_MLP = ("mlp.linear_fc2.post_layernorm.weight", "post_mlp_layernorm.weight")


@dataclass(frozen=True)
class Sizes:
    """Sizes in config.json that nearly every family has.

    `groups` is the number of key-value heads. `gain` is the stored value of a norm whose gain is one: 1, or 0 if HF adds one.
    """

    hidden: int
    layers: int
    vocab: int
    heads: int
    groups: int
    head_dim: int
    tied: bool
    gain: float

    @classmethod
    def of(cls, config: HFConfig, *, gain: float = 1.0) -> "Sizes":
        """Read the sizes from a config.json. Raises UnsupportedModel if one is missing or the heads
        do not divide into groups.
        """
        hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        sizes = cls(
            hidden,
            integer(config, "num_hidden_layers"),
            integer(config, "vocab_size"),
            heads,
            integer(config, "num_key_value_heads", default=heads),
            integer(config, "head_dim", default=hidden // heads),
            bool(config.get("tie_word_embeddings", False)),
            gain,
        )
        if heads % sizes.groups:
            raise UnsupportedModel(f"config: {heads} attention heads do not divide into {sizes.groups} key-value heads")
        return sizes


def integer(config: HFConfig, *keys: str, default: int | None = None) -> int:
    """Return a positive integer of the config: that of the first of `keys` which is set. Raises
    UnsupportedModel for other values.
    """
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UnsupportedModel(f"config: {' or '.join(keys)} should be a positive integer, is {value!r}")
    return value


def refuse(config: HFConfig, *flags: str) -> None:
    """Raise UnsupportedModel if one of the options is on: no table has their tensors."""
    for flag in flags:
        if config.get(flag):
            raise UnsupportedModel(f"config: {flag}={config[flag]!r} has weights that no table describes yet")


def refuse_others(config: HFConfig, option: str, *computed: str | float) -> None:
    """Raise LayoutError if an option has a value that is not in `computed`: vLLM's model does not read it, and computes with the
    first of these. After UnsupportedModel, a model with Hugging Face names would be taken as one of a family without a table.
    """
    if config.get(option) not in (None, *computed):
        raise LayoutError(
            f"config: {option}={config[option]!r}: vLLM computes with {computed[0]!r} whatever the config says. Train the model "
            f"with {computed[0]!r}"
        )


def whole(tensor: str, *shape: int, padded: bool = False) -> Weight:
    """Return a weight that is one HF tensor."""
    return Weight(shape, (Rows(0, shape[0], tensor),), padded=padded)


def norm(tensor: str, size: Sizes, channels: int | None = None) -> Weight:
    """Return the gain of a norm over `channels`, by default the hidden size."""
    return replace(whole(tensor, channels or size.hidden), gain=size.gain)


def joined(tensors: tuple[str, ...], rows: int, *rest: int) -> Weight:
    """Return a weight that concatenates HF tensors of `rows` rows each. `rest` has the dimensions after the first."""
    runs = tuple(Rows(i * rows, rows, tensor) for i, tensor in enumerate(tensors))
    return Weight((len(tensors) * rows, *rest), runs)


def qkv(size: Sizes, suffix: str, *rest: int) -> Weight:
    """Return Megatron's fused projection: for each key-value head its query heads, its key and its value.

    `suffix` is `weight` or `bias`; `rest` has the dimensions after the first.
    """
    d, queries = size.head_dim, size.heads // size.groups * size.head_dim
    runs: list[Rows] = []
    for group in range(size.groups):
        at = group * (queries + 2 * d)
        runs.append(Rows(at, queries, f"self_attn.q_proj.{suffix}", group * queries))
        runs.append(Rows(at + queries, d, f"self_attn.k_proj.{suffix}", group * d))
        runs.append(Rows(at + queries + d, d, f"self_attn.v_proj.{suffix}", group * d))
    return Weight((size.groups * (queries + 2 * d), *rest), tuple(runs))


def attention(size: Sizes, *, qkv_bias: bool = False, head_norms: bool = False) -> Layer:
    """Return grouped-query attention and the norm before it. `head_norms` adds norms of each query head and key head."""
    layer: Layer = dict.fromkeys(BEFORE_ATTENTION, (norm("input_layernorm.weight", size),))
    layer["self_attention.linear_qkv.weight"] = (qkv(size, "weight", size.hidden),)
    layer["self_attention.linear_proj.weight"] = (whole("self_attn.o_proj.weight", size.hidden, size.heads * size.head_dim),)
    if qkv_bias:
        layer["self_attention.linear_qkv.bias"] = (qkv(size, "bias"),)
    if head_norms:
        layer["self_attention.q_layernorm.weight"] = (norm("self_attn.q_norm.weight", size, size.head_dim),)
        layer["self_attention.k_layernorm.weight"] = (norm("self_attn.k_norm.weight", size, size.head_dim),)
    return layer


def whole_norms(size: Sizes) -> Layer:
    """Return norms over all query heads at once, and over all key heads."""
    return {
        "self_attention.q_layernorm.weight": (norm("self_attn.q_norm.weight", size, size.heads * size.head_dim),),
        "self_attention.k_layernorm.weight": (norm("self_attn.k_norm.weight", size, size.groups * size.head_dim),),
    }


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def gated(prefix: str, hidden: int, ffn: int, names: tuple[str, str, str] = PROJECTIONS) -> tuple[Weight, Weight]:
    """Return the two linears of a gated MLP: [gate; up], and down."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return joined((gate, up), ffn, hidden), whole(down, hidden, ffn)


def before_mlp(size: Sizes, name: str = "post_attention_layernorm") -> Layer:
    """Return the norm before an MLP."""
    return dict.fromkeys(BEFORE_MLP, (norm(f"{name}.weight", size),))


def post_norms(size: Sizes, attention: str, mlp: str) -> Layer:
    """Return the norms of the outputs of attention and MLP, before they are added to the hidden states."""
    after_attention: Layer = dict.fromkeys(AFTER_ATTENTION, (norm(f"{attention}.weight", size),))
    return after_attention | dict.fromkeys(AFTER_MLP, (norm(f"{mlp}.weight", size),))


def dense_mlp(size: Sizes, ffn: int, before: str = "post_attention_layernorm") -> Layer:
    """Return a gated MLP and the norm `before` it."""
    up, down = gated("mlp", size.hidden, ffn)
    return before_mlp(size, before) | {"mlp.linear_fc1.weight": (up,), "mlp.linear_fc2.weight": (down,)}


def expert_mlp(size: Sizes, ffn: int, experts: int, prefix: str = "mlp", names: tuple[str, str, str] = PROJECTIONS) -> Layer:
    """Return routed gated MLPs, the router and the norm before them. HF stores one tensor per expert and projection.

    Args:
        size: Sizes of the model.
        ffn: Width of an expert.
        experts: Number of experts.
        prefix: HF's name of the module in the layer.
        names: HF's names of the gate, up and down projections.
    """
    ups, downs = zip(*(gated(f"{prefix}.experts.{e}", size.hidden, ffn, names) for e in range(experts)), strict=True)
    return before_mlp(size) | {
        "mlp.router.weight": (whole(f"{prefix}.gate.weight", experts, size.hidden),),
        "mlp.experts.experts.linear_fc1.weight": ups,
        "mlp.experts.experts.linear_fc2.weight": downs,
    }


def stacked(mixture: Layer, *, transposed: bool) -> Layer:
    """Return a layer of `expert_mlp` whose experts HF stacks in one tensor for gate and up, and in one for down.

    `mlp.experts.gate_up_proj` is [experts, 2 ffn, hidden], `mlp.experts.down_proj` [experts, hidden, ffn]; with `transposed`, the
    last two dimensions are in reverse order.
    """
    found = dict(mixture)
    for part, name in (("linear_fc1", "gate_up_proj"), ("linear_fc2", "down_proj")):
        key = f"mlp.experts.experts.{part}.weight"
        found[key] = tuple(
            Weight(weight.shape, (Rows(0, weight.shape[0], f"mlp.experts.{name}", index=expert),), transpose=transposed)
            for expert, weight in enumerate(mixture[key])
        )
    return found


def shared_expert(name: str, hidden: int, ffn: int, gate: str | None = None) -> Layer:
    """Return the gated MLP that all tokens pass beside the routed experts.

    `name` is HF's name of it, `gate` that of the linear that weights its output, if there is one.
    """
    up, down = gated(name, hidden, ffn)
    layer: Layer = {"mlp.shared_experts.linear_fc1.weight": (up,), "mlp.shared_experts.linear_fc2.weight": (down,)}
    return layer | ({"mlp.shared_experts.gate_weight": (whole(f"{gate}.weight", 1, hidden),)} if gate else {})


def placed(layer: Layer, key: str, prefix: str) -> Layer:
    """Return the same weights, with their Megatron keys under `key` and their HF names under `prefix`."""
    return {key + inner: tuple(weight.under(prefix) for weight in weights) for inner, weights in layer.items()}


def decoder(size: Sizes, layer: Callable[[int], Layer]) -> Table:
    """Return the table of embeddings, the layers `layer(0)`, `layer(1)`, …, the final norm and, unless tied, the head."""
    table: Layer = {
        "embedding.word_embeddings.weight": (whole("model.embed_tokens.weight", size.vocab, size.hidden, padded=True),),
        "decoder.final_layernorm.weight": (norm("model.norm.weight", size),),
    }
    if not size.tied:
        table["output_layer.weight"] = (whole("lm_head.weight", size.vocab, size.hidden, padded=True),)
    for n in range(size.layers):
        table |= placed(layer(n), f"decoder.layers.{n}.", f"model.layers.{n}.")
    return table
