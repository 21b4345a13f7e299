"""Comparison of two config.json: which values differ that a model computes with.

Files of one model differ by what wrote them: transformers 4 or 5, a trainer, an editor. Compared is what they mean: neither the
order of keys, nor a null that stands for an absent key, nor the place of rotary parameters.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

IGNORED = frozenset((
    "transformers_version", "dtype", "torch_dtype", "name_or_path", "auto_map", "tokenizer_class", "processor_class", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id",
    "initializer_range", "initializer_factor", "gradient_checkpointing",
    "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout",
    "activation_dropout", "embedding_dropout", "resid_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "layerdrop",
    "router_aux_loss_coef", "router_z_loss_coef", "router_jitter_noise", "output_router_logits", "aux_loss_alpha", "seq_aux",
    "pretraining_tp", "ep_size",
    "output_attentions", "output_hidden_states", "return_dict", "use_return_dict", "torchscript", "chunk_size_feed_forward",
    "attn_implementation", "experts_implementation",
    "problem_type", "finetuning_task", "task_specific_params", "id2label", "label2id",
    "do_sample", "temperature", "top_p", "num_beams", "max_length", "min_length", "repetition_penalty", "length_penalty",
))  # fmt: skip
"""Names without a meaning for what a served model computes: how it is trained, saved, initialised or sampled by default.

Token ids are among them: trainers write their tokenizer's into the config, and a server takes its own from its tokenizer.
"""
_UNSAID = (("is_encoder_decoder", False), ("is_decoder", False), ("add_cross_attention", False))
"""Values that stand for an absent key: transformers writes them or leaves them out."""
_ROPE = ("rope_parameters", "rope_scaling")
_OF_ROPE = ("rope_theta", "partial_rotary_factor")
_MODULES = ("modules_to_not_convert", "ignored_layers", "ignore")  # the tensors show which modules are quantised


class Difference(NamedTuple):
    """A value that differs. `None` stands for an absent one."""

    name: str
    """Path of the value in config.json, such as `rope_parameters.rope_theta`."""
    first: Any
    second: Any


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return the values that differ between two contents of config.json, in the order of their names."""
    return list(_differences(_plain(first), _plain(second), ""))


def described(found: Sequence[Difference], where: str = "here") -> str:
    """Return the first few differences as part of a sentence about a version, the second one; the first one is `where`."""
    values = [f"{name} is {_text(second)} in the version, {_text(first)} {where}" for name, first, second in found[:6]]
    return "; ".join(values + ([f"and {len(found) - 6} more"] if len(found) > 6 else []))


def _text(value: object) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], at: str) -> Iterator[Difference]:
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name), second.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _differences(one, other, f"{at}{name}.")
        elif one != other:
            yield Difference(f"{at}{name}", one, other)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with a meaning, in one form."""
    kept = {
        name: value if name == "rope_parameters" else _plain_value(value)
        for name, value in _with_ropes(config).items()
        if not _is_ignored(name)
    }
    if isinstance(architectures := kept.get("architectures"), list):
        kept["architectures"] = sorted(architectures, key=str)
    if isinstance(quantization := kept.get("quantization_config"), dict):
        kept["quantization_config"] = {name: value for name, value in quantization.items() if name not in _MODULES}
    heads = kept.get("num_attention_heads")
    if isinstance(heads, int) and heads and isinstance(kept.get("hidden_size"), int):
        if kept.get("head_dim") is None:
            kept["head_dim"] = kept["hidden_size"] // heads
        if kept.get("num_key_value_heads") is None:
            kept["num_key_value_heads"] = heads
    return {name: value for name, value in kept.items() if value is not None and value != {} and (name, value) not in _UNSAID}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    return [_plain_value(item) for item in value] if isinstance(value, list | tuple) else value


def _is_ignored(name: str) -> bool:
    return name in IGNORED or name.startswith("_")


def _with_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with rotary parameters as transformers 5 has them, in `rope_parameters`.

    transformers 4 has `rope_theta` and `partial_rotary_factor` beside `rope_scaling`.
    """
    given: Mapping[str, Any] = next((found for name in _ROPE if isinstance(found := config.get(name), Mapping)), {})
    if not given and all(config.get(name) is None for name in _OF_ROPE):
        return dict(config)
    rest = {name: value for name, value in config.items() if name not in (*_ROPE, *_OF_ROPE)}
    if given and all(isinstance(value, Mapping) for value in given.values()):  # of each type of layers
        rest.pop("rope_local_base_freq", None)
        return rest | {"rope_parameters": {kind: _rope(rope) for kind, rope in given.items()}}
    return rest | {"rope_parameters": _rope({name: config[name] for name in _OF_ROPE if name in config} | dict(given))}


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kept = {name: _plain_value(value) for name, value in rope.items() if name != "type" and value is not None}
    return kept | {"rope_type": kind}
