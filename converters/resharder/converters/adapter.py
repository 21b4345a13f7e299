"""Adapters as PEFT's folders: what `adapter_config.json` may say, and the tensors that belong to it. Without PEFT or torch.

A server loads an adapter beside its base. Refused is what PEFT or vLLM would load as something else than what was trained
(vllm/lora/peft_helper.py, read against vLLM 0.32; peft/tuners/lora/config.py, against PEFT 0.21).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from resharder.converters.errors import LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.json_input import is_count, is_number

PREFIX = "base_model.model."
"""First part of the names of all tensors in a PEFT folder."""
_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.(?P<half>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?P<end>\.weight)?"
)
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_SHOWN = 4

_UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA scales the base's weights by a magnitude, which vLLM does not: train with use_dora=False",
    "modules_to_save": "it trains whole modules besides the adapter, which vLLM takes from the base: train with "
    "modules_to_save=None, or merge the adapter and publish the whole model",
    "trainable_token_indices": "it trains rows of the embeddings, which vLLM takes from the base: train without "
    "trainable_token_indices, or merge the adapter and publish the whole model",
    "lora_bias": "vLLM adds no bias of lora_B: train with lora_bias=False",
    "target_parameters": "it adapts parameters rather than modules, as those of stacked experts, and vLLM knows no such tensors: "
    "train with target_modules only",
    "layer_replication": "vLLM does not repeat the base's layers: train without layer_replication",
    "alora_invocation_tokens": "vLLM would apply an activated LoRA to all tokens: train without alora_invocation_tokens",
    "use_qalora": "vLLM does not pool an adapter's input: train with use_qalora=False",
    "use_bdlora": "vLLM knows no block-diagonal LoRA: train without use_bdlora",
    "arrow_config": "vLLM does not route between adapters: publish each of them as a model of its own",
    "kasa_config": "vLLM does not know KaSA: train without kasa_config",
    "monteclora_config": "vLLM does not know MonteCLoRA: train without monteclora_config",
}
"""Fields of PEFT's LoraConfig with which an adapter computes something that servers do not, and what to do."""


class _Pair(NamedTuple):
    """The two tensors of one module."""

    first: tuple[int, ...] | None
    """Shape of lora_A."""
    second: tuple[int, ...] | None


def is_adapter_config(config: Mapping[str, Any]) -> bool:
    """Return whether this is the content of an `adapter_config.json` rather than that of a `config.json`."""
    return "peft_type" in config


def check_config(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel unless PEFT and vLLM compute the same with an adapter of this `adapter_config.json`."""
    if not is_adapter_config(config):
        raise UnsupportedModel(
            f"expected the content of an adapter_config.json, found no peft_type among {sorted(map(str, config))[:8]}: pass "
            "PEFT's LoraConfig, or what its to_dict() returns"
        )
    if (kind := str(config["peft_type"]).removeprefix("PeftType.")) != "LORA":
        raise UnsupportedModel(f"the adapter is of type {kind[:40]}, and servers load LoRA alone: train a LoRA adapter")
    for field, why in _UNSUPPORTED.items():
        if config.get(field):
            raise UnsupportedModel(f"{field} of the adapter is {str(config[field])[:80]}: {why}")
    if (bias := config.get("bias", "none")) != "none":
        raise UnsupportedModel(
            f"bias of the adapter is {str(bias)[:40]!r}, and vLLM takes biases from the base: train with bias='none'"
        )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
        raise UnsupportedModel(
            f"init_lora_weights of the adapter is {start[:40]!r}, which changes the base's weights: convert the adapter with "
            "save_pretrained(path_initial_model_for_weight_conversion=…) of PEFT, or publish the changed base and set "
            "init_lora_weights to true"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (is_count(rank) and rank) or not is_number(alpha):
        raise UnsupportedModel(
            f"expected a rank above 0 as r and a number as lora_alpha, found {str(rank)[:40]} and {str(alpha)[:40]}"
        )


def check_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare an adapter's tensors with its config, which `check_config` has accepted.

    Args:
        config: Content of `adapter_config.json`.
        shapes: Shape of each whole tensor by its name in the folder.

    Raises:
        UnknownTensor: No tensor at all, one that is not of a LoRA adapter, or half of a module's two.
        LayoutError: A shape that the rank does not explain.
    """
    if not shapes:
        raise UnknownTensor("the adapter has no tensor: no module of the model is adapted")
    pairs: dict[str, _Pair] = {}
    strange = []
    for name, shape in shapes.items():
        if (found := _parts(name)) is None:
            strange.append(name)
            continue
        module, is_first = found
        known = pairs.get(module, _Pair(None, None))
        pairs[module] = known._replace(first=shape) if is_first else known._replace(second=shape)
    if strange:
        raise UnknownTensor(
            f"{_listed(strange)}: expected the names of a LoRA adapter as PEFT writes them, such as "
            f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
        )
    if half := [module for module, pair in pairs.items() if None in pair]:
        raise UnknownTensor(f"{_listed(half)}: expected lora_A and lora_B of each module, found one of them")
    for module, (first, second) in pairs.items():
        _check_pair(module, first or (), second or (), config)


def _check_pair(module: str, first: tuple[int, ...], second: tuple[int, ...], config: Mapping[str, Any]) -> None:
    if len(first) != 2 or len(second) != 2:
        raise LayoutError(
            f"{module}: expected matrices as lora_A and lora_B, found {list(first)} and {list(second)}: servers adapt linear "
            "layers and embeddings, and no convolutions"
        )
    rank = first[0]
    if second[1] != rank or (rank != config["r"] and not config.get("rank_pattern")):
        raise LayoutError(
            f"{module}: expected lora_A of {config['r']} rows and lora_B of as many columns, the adapter's r, found "
            f"{list(first)} and {list(second)}"
        )


def _parts(name: str) -> tuple[str, bool] | None:
    """Return the module of a tensor, and whether it is the first of the two; None for a name of another form."""
    found = _NAME.fullmatch(name)
    if found is None or found["half"].startswith("lora_embedding") == bool(found["end"]):
        return None
    return found["module"], found["half"].endswith("A")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
