"""Formats of quantised checkpoints, parsed from the `quantization_config` of a config.json.

| format | `quantization_config` | tensors of a module |
|---|---|---|
| FP8 in blocks | `quant_method: fp8`, `weight_block_size: [128, 128]` | `weight` F8_E4M3, `weight_scale_inv` F32 |
| FP8 by channel | `quant_method: compressed-tensors`, as `CHANNELS` | `weight` F8_E4M3, `weight_scale` F32 of one column |

A weight is stored as `cast(weight / scale)`: the scale of a block of elements is its largest absolute value over 448. A channel
is a block of one row.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from resharder.converters.architectures.table import HFConfig
from resharder.converters.errors import UnsupportedModel

FP8_MAX = 448.0
"""Largest value of float8_e4m3fn."""
Block = tuple[int, int]
"""Rows and columns of a block."""
BLOCK: Block = (128, 128)
SCALE_SUFFIX = "_scale_inv"
_CHANNEL_SCALE_SUFFIX = "_scale"

ACCEPTED = {
    "quant_method": ("fp8",),
    "weight_block_size": (list(BLOCK), BLOCK),
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
}
"""Accepted values of each key. `fmt` may be absent."""
_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}
"""FP8 by channel, with activations quantised by vLLM for each token, as compressed-tensors describes it."""
_UNREAD = ("quantization_status", "global_compression_ratio", "version")
_OBSERVERS = ("observer", "observer_kwargs")
NOT_CONVERTED = ("modules_to_not_convert", "ignored_layers")
"""Keys with names of modules that stay in their dtype, beside those of `UNCONVERTED`."""

UNCONVERTED = frozenset(
    {
        "embed_tokens", "lm_head", "head",  # embeddings and output heads, of layers for multi-token prediction too
        "gate", "router", "shared_expert_gate",  # routers
        "eh_proj", "input_proj",  # projections into layers for multi-token prediction
        "in_proj_ba", "in_proj_a", "in_proj_b", "conv1d",  # gates of gated delta nets
    }
)  # fmt: skip
"""Last names of modules that released FP8 checkpoints leave in BF16, of all families. Vectors stay in their dtype too."""


@dataclass(frozen=True)
class Scheme:
    """FP8 in blocks of 128 by 128, or by channel.

    Attributes:
        kept: Names of modules that stay in their dtype besides those of `UNCONVERTED`.
        channels: Whether each row has a scale of its own.
    """

    kept: frozenset[str] = frozenset()
    channels: bool = False

    def block_of(self, shape: tuple[int, ...]) -> Block:
        """Return the rows and columns of the blocks of a matrix."""
        return (1, max(1, shape[1])) if self.channels else BLOCK

    def converts(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether the tensor `name` of a checkpoint is cast: matrices of modules that are not left unconverted."""
        module, _, leaf = name.rpartition(".")
        return leaf == "weight" and len(shape) == 2 and not self._keeps(module)

    def _keeps(self, module: str) -> bool:
        return module.rpartition(".")[2] in UNCONVERTED or module in self.kept

    def scale_of(self, name: str) -> str:
        """Return the name of the scales of a tensor."""
        return name + (_CHANNEL_SCALE_SUFFIX if self.channels else SCALE_SUFFIX)

    def unconverted(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Return the names of the modules that stay in their dtype, for `modules_to_not_convert`."""
        weights = [name.removesuffix(".weight") for name, shape in shapes.items() if name.endswith(".weight") and len(shape) > 1]
        return sorted({module for module in weights if self._keeps(module)} | self.kept | {"lm_head"})

    def config(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """Return the `quantization_config` of a model whose tensors have these shapes."""
        if self.channels:
            return CHANNELS | {"quantization_status": "compressed", "ignore": self.unconverted(shapes)}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(BLOCK),
            "modules_to_not_convert": self.unconverted(shapes),
        }


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """Return the format of a `quantization_config`. Raises UnsupportedModel for any other than the accepted ones."""
    if not isinstance(config, Mapping):
        raise _refusal(config)
    found = dict(config)
    if found.get("quant_method") == CHANNELS["quant_method"]:
        kept = _names(found, "ignore")
        if _plain({key: value for key, value in found.items() if key not in _UNREAD}) != CHANNELS:
            raise _refusal(config)
        return Scheme(kept, channels=True)
    kept = frozenset[str]().union(*(_names(found, key) for key in NOT_CONVERTED))
    for key, values in ACCEPTED.items():
        value = found.pop(key, values[0] if key == "fmt" else None)
        if value not in values:
            raise _refusal(config)
    if found:
        raise _refusal(config)
    return Scheme(kept)


def _names(config: dict[str, Any], key: str) -> frozenset[str]:
    """Remove names of modules from a config, and return them. Raises UnsupportedModel for patterns and other values."""
    names = config.pop(key, None) or ()
    if isinstance(names, str) or not all(isinstance(name, str) and not name.startswith("re:") for name in names):
        raise UnsupportedModel(f"quantization_config: expected names of modules as {key}, got {names!r}")
    return frozenset(names)


def _plain(value: Any) -> Any:
    """Return a config without empty values, and without the observers that chose its scales."""
    if not isinstance(value, Mapping):
        return value
    plain = {key: _plain(inner) for key, inner in value.items() if key not in _OBSERVERS}
    return {key: inner for key, inner in plain.items() if inner is not None and inner != {}}


def _refusal(config: object) -> UnsupportedModel:
    wanted = ", ".join(f"{key!r}: {values[0]!r}" for key, values in ACCEPTED.items())
    return UnsupportedModel(
        f"quantization_config: expected {{{wanted}}}, with names of modules as {' or '.join(NOT_CONVERTED)} if some "
        f"stay unconverted, or {CHANNELS!r} with those names as ignore; got {config!r}"
    )


def check_family(config: HFConfig, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Raise UnsupportedModel for a model that this format cannot describe, or of which no server was seen to load it.

    These are experts stacked in tensors of three dimensions, and models with a tower.
    """
    if "vision_config" in config:
        raise UnsupportedModel(
            f"{config.get('model_type')!r} has a tower, and casts of such models are not supported: publish without "
            "quantization_config"
        )
    stacked = next((name for name, shape in shapes if len(shape) == 3 and ".experts." in name), None)
    if stacked is not None:
        raise UnsupportedModel(
            f"{stacked} has stacked experts, for which FP8 checkpoints in blocks have no form: publish "
            f"{config.get('model_type')!r} without quantization_config"
        )
