"""Tiny random Hugging Face checkpoints of every family, on disk as `save_pretrained` writes them.

Their tokenizer knows the words `t0 t1 t2 …`, so that vLLM can serve them. Shapes are chosen so that dimensions that could be
confused differ. With torch.distributed initialised transformers saves on rank 0 only: make them before.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

_COMMON = {
    "vocab_size": 1003,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 192,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_LATENT = _COMMON | {
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 52,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
del _LATENT["head_dim"]
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 512,
}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}
_GEMMA = _COMMON | {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 200,
    "sliding_window": 7,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": _LATENT | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "rope_parameters": _YARN},
    "deepseek_v2_lite": _LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": _LATENT
    | {"model_type": "deepseek_v3", "num_experts_per_tok": 4, "rope_parameters": _YARN, "num_nextn_predict_layers": 1},
    "gemma": _COMMON | {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": _GEMMA | {"model_type": "gemma2", "attn_logit_softcapping": 5.0, "final_logit_softcapping": 2.0},
    "gemma3": _GEMMA
    | {
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    },
    "glm4_moe": _COMMON
    | {key: _LATENT[key] for key in ("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "routed_scaling_factor")}
    | {"model_type": "glm4_moe", "first_k_dense_replace": 1, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1}
    | {"use_qk_norm": True, "attention_bias": True},
    "glm4_moe_lite": _LATENT
    | {"model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense"] + 3 * ["sparse"]},
    "glm": _COMMON | {"model_type": "glm", "attention_bias": True},
    "glm4": _COMMON | {"model_type": "glm4", "attention_bias": True},
    "gpt_oss": _COMMON
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 12,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    },
    "hy_v3": _COMMON
    | {"model_type": "hy_v3", "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 2, "moe_intermediate_size": 48}
    | {"router_scaling_factor": 1.5, "mlp_layer_types": ["dense"] + 3 * ["sparse"]},
    "kimi_k2": _LATENT | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "llama": _COMMON | {"model_type": "llama"},
    "llama_biased": _COMMON | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mimo": _COMMON | {"model_type": "mimo", "num_nextn_predict_layers": 1},
    "minimax_m2": _COMMON
    | {
        "model_type": "minimax_m2",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "rotary_dim": 16,
    },
    "mistral": _COMMON | {"model_type": "mistral", "sliding_window": 9},
    "mixtral": _COMMON | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "nemotron": _COMMON | {"model_type": "nemotron", "hidden_size": 64, "intermediate_size": 80},
    "olmoe": _COMMON
    | {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5},
    "qwen2": _COMMON | {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2_moe": _COMMON | _EXPERTS | {"model_type": "qwen2_moe", "norm_topk_prob": False, "shared_expert_intermediate_size": 96},
    "qwen3": _COMMON | {"model_type": "qwen3"},
    "qwen3_tied": _COMMON | {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3_moe": _COMMON | _EXPERTS | {"model_type": "qwen3_moe"},
    "qwen3_next": _COMMON | _EXPERTS | _DELTA | {"model_type": "qwen3_next", "shared_expert_intermediate_size": 96},
    "qwen3_5": _COMMON | _DELTA | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": _COMMON | _EXPERTS | _DELTA | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 96},
}
del _FAMILIES["olmoe"]["head_dim"], _FAMILIES["glm4_moe_lite"]["first_k_dense_replace"]
FAMILIES = tuple(_FAMILIES)
_TOWER = {
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 8,
    "out_hidden_size": 128,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_QWEN3_TOWER = _TOWER | {"num_position_embeddings": 16}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
_INTERLEAVED = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True, "rope_theta": 5e6}
_IMAGE_TOKENS = {"image_token_id": 990, "video_token_id": 991, "vision_start_token_id": 992, "vision_end_token_id": 993}


def _text(family: str, **changes: Any) -> dict[str, Any]:
    """The settings of a family's text model, as part of a wrapper."""
    settings = _FAMILIES[family] | changes
    without = ("model_type", "use_qk_norm", "num_nextn_predict_layers")  # which no text model in a wrapper has
    return {name: value for name, value in settings.items() if name not in without}


_PARTIAL = _INTERLEAVED | {"partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
_WRAPPED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl",
        "text_config": _text(
            "qwen2", rope_parameters={"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6}, hidden_size=128
        ),
        "vision_config": _TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
    }
    | _IMAGE_TOKENS,
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": _text("qwen3", rope_parameters=_INTERLEAVED),
        "vision_config": _QWEN3_TOWER | {"deepstack_visual_indexes": [0, 2]},
    }
    | _IMAGE_TOKENS,
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe",
        "text_config": _text("qwen3_moe", rope_parameters=_INTERLEAVED, moe_intermediate_size=48),  # twice it is not hidden_size
        "vision_config": _QWEN3_TOWER | {"deepstack_visual_indexes": [1]},
    }
    | _IMAGE_TOKENS,
    "qwen3_5_vl": {
        "model_type": "qwen3_5",
        "text_config": _text("qwen3_5", rope_parameters=_PARTIAL),
        "vision_config": _QWEN3_TOWER,
    }
    | _IMAGE_TOKENS,
    "qwen3_5_moe_vl": {
        "model_type": "qwen3_5_moe",
        "text_config": _text("qwen3_5_moe", rope_parameters=_PARTIAL),
        "vision_config": _QWEN3_TOWER,
    }
    | _IMAGE_TOKENS,
    "gemma3_vl": {
        "model_type": "gemma3",
        "text_config": _text("gemma3"),
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 990,
        "boi_token_index": 992,
        "eoi_token_index": 993,
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        "text_config": _text(
            "glm4_moe",
            n_group=1,
            topk_group=1,
            rope_parameters={
                "rope_type": "default",
                "mrope_section": [2, 3, 3],
                "partial_rotary_factor": 0.5,
                "rope_theta": 1e4,
            },
        ),
        "vision_config": _TOWER | {"image_size": 16},
    }
    | _IMAGE_TOKENS,
    "kimi_k25": {
        "model_type": "kimi_k25",
        "text_config": _text("kimi_k2") | {"num_nextn_predict_layers": 0},
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "patch_size": 4,
            "pos_emb_height": 6,
            "pos_emb_width": 5,
            "merge_kernel_size": [2, 1],
        },
        "projection_hidden_size": 64,
    }
    | _IMAGE_TOKENS,
}
WRAPPED = tuple(_WRAPPED)
"""Families whose language model is in a wrapper with a tower."""
ALL = FAMILIES + WRAPPED
_NAMES = {
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "qwen3_vl_moe": "Qwen3VLMoe",
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "gemma3": "Gemma3",
    "glm4v_moe": "Glm4vMoe",
    "kimi_k25": "KimiK25",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe": "Glm4Moe",
    "glm4_moe_lite": "Glm4MoeLite",
    "glm": "Glm",
    "glm4": "Glm4",
    "gpt_oss": "GptOss",
    "hy_v3": "HYV3",
    "kimi_k2": "DeepseekV3",
    "llama": "Llama",
    "mimo": "MiMo",
    "minimax_m2": "MiniMaxM2",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "nemotron": "Nemotron",
    "olmoe": "Olmoe",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
}
_STANDS_IN = {"kimi_k2": "deepseek_v3", "mimo": "qwen2"}
"""Whose classes transformers opens a family with that it has none for."""


def tolerance(family: str) -> float:
    """How far float32 logits of two programs may be apart. With gated delta nets (found: up to 8.5e-5) each of them is 1e-4 off
    what it computes in float64, with Gemma's large hidden states (found: up to 2.8e-5) 4e-5."""
    delta = "linear_num_key_heads" in text_of(tiny_config(family))
    return 2e-4 if delta else 1e-4 if family == "gemma" else 2e-5


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny model, with `changes`; those of a family in a wrapper are changes of its language model."""
    if family in _WRAPPED:
        wrapper = _WRAPPED[family]
        text = wrapper["text_config"] | changes
        tied = text.get("tie_word_embeddings", False)
        settings = {"dtype": "float32"} | wrapper | {"text_config": text, "tie_word_embeddings": tied}
        name = f"{_NAMES[settings['model_type']]}ForConditionalGeneration"
        return _transformers_config(settings | {"architectures": [name]}).to_dict()
    settings = {"dtype": "float32"} | _FAMILIES[family] | changes
    name = f"{_NAMES[settings['model_type']]}ForCausalLM"
    return {**_transformers_config(settings | {"architectures": [name]}).to_dict(), "model_type": settings["model_type"]}


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model, in a wrapper or not."""
    found: Mapping[str, Any] = config.get("text_config", config)
    return found


def words(config: Mapping[str, Any]) -> int:
    """How many token ids, from 0 on, stand for text."""
    first = config.get("image_token_id") or config.get("image_token_index")
    return int(first or text_of(config)["vocab_size"])


def family_of(model_type: str) -> str:
    """The tiny family of a `model_type`."""
    return next(
        (family for family, settings in _WRAPPED.items() if settings["model_type"] == model_type),
        model_type.removesuffix("_text"),
    )


def _transformers_config(config: dict[str, Any]) -> PretrainedConfig:
    kind = config["model_type"]
    kind = _STANDS_IN.get(kind, kind)
    made: PretrainedConfig = AutoConfig.for_model(**config | {"model_type": kind})
    made.model_type = kind  # vLLM writes another into transformers' class (transformers_utils/config.py, _register_config_class)
    return made


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Token `i` is the word `ti`."""
    levels = Tokenizer(models.WordLevel(vocab={f"t{i}": i for i in range(vocab_size)}, unk_token="t3"))
    levels.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=levels, bos_token="t1", eos_token="t2", pad_token="t0", unk_token="t3")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(directory)


def save_checkpoint(directory: Path, config: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A folder that `load_model` and vLLM open. Weights are large enough that logits differ clearly between seeds."""
    model_config = _transformers_config(config)
    model_config.dtype = dtype
    model = _auto_class(config).from_config(model_config, attn_implementation="eager").to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, tuple(parameter.shape), generator))
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):  # of experts: in fp32 whatever the rest is in
                buffer.data = _random(name, tuple(buffer.shape), generator)
    model.save_pretrained(directory)
    if "vision_config" in config:
        names = _RELEASED_NAMES.get(config["model_type"], {}).items()
        save_file(_released(load_checkpoint(directory), names), directory / "model.safetensors", metadata={"format": "pt"})
    if config.get("num_nextn_predict_layers"):
        _add_mtp(directory, config, generator, dtype)
    (directory / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    save_tokenizer(directory, text_of(config)["vocab_size"])
    return directory


def _auto_class(config: dict[str, Any]) -> Any:
    return AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM


_RELEASED_NAMES = {
    "gemma3": {"vision_tower.": "vision_tower.vision_model."},
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        "model.mm_projector.": "mm_projector.",
    },
}
"""First parts of names that transformers saves a new model with, and of the released checkpoint's, by `model_type`."""


def _released(tensors: dict[str, torch.Tensor], names: Collection[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Tensors as released checkpoints have them, where transformers saves a new model otherwise: experts of Qwen3-VL-MoE
    transposed, those of Qwen3.5-MoE stacked, and other names."""
    found: dict[str, torch.Tensor] = {}
    stacked: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        stem, experts, rest = name.partition(".mlp.experts.")
        if experts and "linear_attn" not in name and _stacks(tensors):
            stacked.setdefault(f"{stem}{experts}{rest.split('.')[1]}", []).append(tensors[name])
        elif experts and rest in ("gate_up_proj", "down_proj"):
            found[name] = tensors[name].transpose(1, 2).contiguous()
        else:
            found[next((there + name.removeprefix(here) for here, there in names if name.startswith(here)), name)] = tensors[name]
    for name, downs in stacked.items():
        stem, _, kind = name.rpartition(".")
        if kind == "down_proj":
            gates, ups = stacked[f"{stem}.gate_proj"], stacked[f"{stem}.up_proj"]
            found[f"{stem}.down_proj"] = torch.stack(downs)
            found[f"{stem}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
    return found


def _stacks(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether these are Qwen3.5's: GLM-4.5V's experts are not stacked."""
    return any(".linear_attn." in name for name in tensors)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Gains are multiples of 1/1024 around one, so that they are exact in fp32 with one added or taken off, too."""
    values = torch.randn(shape, generator=generator) * 0.1
    return values if len(shape) > 1 or name.endswith("bias") else (values * 1024).round() / 1024 + 1


MTP_NAMES = {
    "deepseek_v3": ("model.layers.{}.", {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}),
    "mimo": (
        "model.mtp_layers.{}.",
        {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj", "norm": "final_layernorm"},
    ),
}
"""Where published checkpoints have the layers that predict further tokens, and what is new in them: DeepSeek-V3's names (in its
README_WEIGHTS.md; the number goes on from the decoder's layers), which GLM-4.5 has too, and MiMo's (vLLM's mimo_mtp.py)."""
MTP_NAMES["glm4_moe"] = MTP_NAMES["deepseek_v3"]


def _add_mtp(directory: Path, config: dict[str, Any], generator: torch.Generator, dtype: torch.dtype) -> None:
    """Adds the layers that predict further tokens, which transformers leaves out when it saves."""
    tensors, hidden, layers = load_checkpoint(directory), config["hidden_size"], config["num_hidden_layers"]
    place, names = MTP_NAMES[config["model_type"]]
    own = {"enorm": (hidden,), "hnorm": (hidden,), "norm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
    last = f"model.layers.{layers - 1}."
    for k in range(config["num_nextn_predict_layers"]):
        prefix = place.format(k if "mtp" in place else layers + k)
        shapes = {name.replace(last, prefix): tuple(tensors[name].shape) for name in tensors if name.startswith(last)}
        shapes |= {f"{prefix}{names[part]}.weight": shape for part, shape in own.items()}
        for name, shape in shapes.items():
            tensors[name] = _random(name, shape, generator).to(torch.float32 if "correction" in name else dtype)
        if "mtp" not in place:
            tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_model(directory: Path) -> PreTrainedModel:
    """The model that transformers loads from a folder, in FP32."""
    config = _transformers_config(json.loads((directory / "config.json").read_text()))
    kind = _auto_class(json.loads((directory / "config.json").read_text()))
    model: PreTrainedModel = kind.from_pretrained(directory, config=config, dtype=torch.float32, attn_implementation="eager")
    return model


def load_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors, by the names on disk."""
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@torch.no_grad()
def greedy_answer(model: torch.nn.Module, prompt: Sequence[int], tokens: int = 8) -> tuple[int, ...]:
    """Return the token ids with which transformers goes on after a prompt."""
    found = list(prompt)
    for _ in range(tokens):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return tuple(found[len(prompt) :])
