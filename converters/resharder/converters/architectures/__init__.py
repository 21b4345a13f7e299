"""Model families: a table of the meaning of each weight, without sharding, and a recipe to build
the model with megatron-core.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from resharder.converters.architectures import (
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    gemma3_vl,
    glm,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    glm4v_moe,
    gpt_oss,
    hy_v3,
    kimi_k25,
    llama,
    mimo,
    minimax_m2,
    mistral,
    mixtral,
    nemotron,
    olmoe,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
)
from resharder.converters.architectures.recipe import Recipe
from resharder.converters.architectures.table import HFConfig, Table, hf_shapes
from resharder.converters.architectures.wrapped import NESTED
from resharder.converters.errors import UnsupportedModel


@dataclass(frozen=True)
class Architecture:
    """Model family.

    `table` and `recipe` raise UnsupportedModel for a config that lacks a size, or whose options add weights that no table
    describes.

    Attributes:
        model_type: `model_type` in config.json.
        name: Name in `architectures` of config.json.
        table: Function from the config to the meaning of each Megatron tensor.
        recipe: Function from the config to the arguments with which megatron-core builds the model.
        proof: `logits` if Megatron's forward pass is compared with that of transformers on the exported checkpoint, else
            `layout` with the reason.
        modules: First part of the names of transformers' modules, with that on disk, where they differ.
        language: The same for transformers' language model alone, without its wrapper.
        turned: Whether transformers 5 has the stacked experts in memory with the last two dimensions in reverse order.
    """

    model_type: str
    name: str
    table: Callable[[HFConfig], Table]
    recipe: Callable[[HFConfig], Recipe]
    proof: str = "logits"
    modules: tuple[tuple[str, str], ...] = ()
    language: tuple[tuple[str, str], ...] = ()
    turned: bool = False


_NESTED = tuple(NESTED.items())
ARCHITECTURES = (
    Architecture("deepseek_v2", "DeepseekV2ForCausalLM", deepseek_v2.table, deepseek_v2.recipe),
    Architecture("deepseek_v3", "DeepseekV3ForCausalLM", deepseek_v3.table, deepseek_v3.recipe),
    Architecture("kimi_k2", "DeepseekV3ForCausalLM", deepseek_v3.table, deepseek_v3.recipe),
    Architecture("gemma", "GemmaForCausalLM", gemma.table, gemma.recipe),
    Architecture("gemma2", "Gemma2ForCausalLM", gemma2.table, gemma2.recipe),
    Architecture("gemma3_text", "Gemma3ForCausalLM", gemma3.table, gemma3.recipe),
    Architecture("glm", "GlmForCausalLM", glm.table, glm.recipe),
    Architecture("glm4", "Glm4ForCausalLM", glm4.table, glm4.recipe),
    Architecture("glm4_moe", "Glm4MoeForCausalLM", glm4_moe.table, glm4_moe.recipe),
    Architecture("glm4_moe_lite", "Glm4MoeLiteForCausalLM", glm4_moe_lite.table, glm4_moe_lite.recipe),
    Architecture("gpt_oss", "GptOssForCausalLM", gpt_oss.table, gpt_oss.recipe),
    Architecture("hy_v3", "HYV3ForCausalLM", hy_v3.table, hy_v3.recipe),
    Architecture("llama", "LlamaForCausalLM", llama.table, llama.recipe),
    Architecture("mimo", "MiMoForCausalLM", mimo.table, mimo.recipe),
    Architecture("minimax_m2", "MiniMaxM2ForCausalLM", minimax_m2.table, minimax_m2.recipe),
    Architecture("mistral", "MistralForCausalLM", mistral.table, mistral.recipe),
    Architecture("mixtral", "MixtralForCausalLM", mixtral.table, mixtral.recipe),
    Architecture("nemotron", "NemotronForCausalLM", nemotron.table, nemotron.recipe),
    Architecture("olmoe", "OlmoeForCausalLM", olmoe.table, olmoe.recipe),
    Architecture("qwen2", "Qwen2ForCausalLM", qwen2.table, qwen2.recipe),
    Architecture("qwen2_moe", "Qwen2MoeForCausalLM", qwen2_moe.table, qwen2_moe.recipe),
    Architecture("qwen3", "Qwen3ForCausalLM", qwen3.table, qwen3.recipe),
    Architecture("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe.table, qwen3_moe.recipe),
    Architecture("qwen3_next", "Qwen3NextForCausalLM", qwen3_next.table, qwen3_next.recipe),
    Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", qwen3_5.table, qwen3_5.recipe),
    Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", qwen3_5_moe.table, qwen3_5_moe.recipe),
    Architecture(
        "qwen2_5_vl",
        "Qwen2_5_VLForConditionalGeneration",
        qwen2_5_vl.table,
        qwen2_5_vl.recipe,
        modules=(("model.visual.", "visual."), ("model.language_model.", "model.")),
    ),
    Architecture("qwen3_vl", "Qwen3VLForConditionalGeneration", qwen3_vl.table, qwen3_vl.recipe, language=_NESTED),
    Architecture(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        qwen3_vl_moe.table,
        qwen3_vl_moe.recipe,
        language=_NESTED,
        turned=True,
    ),
    Architecture("qwen3_5", "Qwen3_5ForConditionalGeneration", qwen3_5.released_table, qwen3_5.released_recipe, language=_NESTED),
    Architecture(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        qwen3_5_moe.released_table,
        qwen3_5_moe.released_recipe,
        language=_NESTED,
    ),
    Architecture(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        gemma3_vl.table,
        gemma3_vl.recipe,
        modules=(
            ("model.vision_tower.", "vision_tower.vision_model."),
            ("model.multi_modal_projector.", "multi_modal_projector."),
            ("model.language_model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ),
        language=(("model.", "language_model.model."),),
    ),
    Architecture("glm4v_moe", "Glm4vMoeForConditionalGeneration", glm4v_moe.table, glm4v_moe.recipe, language=_NESTED),
    Architecture(
        "kimi_k25",
        "KimiK25ForConditionalGeneration",
        kimi_k25.table,
        kimi_k25.recipe,
        language=tuple(kimi_k25.NAMES.items()),
    ),
)

NOT_BUILT: dict[str, str] = {}
"""Families that megatron-core 0.16.1 cannot build, with the reason."""


def architecture_of(config: HFConfig) -> Architecture:
    """Return the family of a config.json.

    Raises UnsupportedModel for a family without a table and a quantised checkpoint.
    """
    model_type, names = config.get("model_type"), config.get("architectures") or ()
    found = next((a for a in ARCHITECTURES if a.model_type == model_type), None)
    if found is None and "text_config" in config:
        inner = (config["text_config"] or {}).get("model_type")
        has_table = any(a.model_type == inner for a in ARCHITECTURES)
        advice = "attach its language model alone, with its text_config" if has_table else "nor has that of its language model"
        raise UnsupportedModel(
            f"config: model_type {model_type!r} is multimodal and has no table; {advice} (model_type {inner!r})"
        )
    if found is None or (names and found.name not in names):
        known = ", ".join(a.name for a in ARCHITECTURES)
        raise UnsupportedModel(f"config: model_type {model_type!r} with architectures {list(names)} has no table; known: {known}")
    if config.get("quantization_config"):
        raise UnsupportedModel(f"config: {found.name} with a quantization_config: quantised checkpoints have no table")
    return found


def table_of(config: HFConfig) -> tuple[Table, Mapping[str, tuple[int, ...]]]:
    """Return the table of a config.json, and the shape of every HF tensor in it by name.

    Results are cached, for processes that compute the layouts of many ranks. Raises as `architecture_of` does.
    """
    return _table_of(architecture_of(config), json.dumps(dict(config), sort_keys=True, default=str))


@lru_cache(maxsize=2)
def _table_of(architecture: Architecture, config: str) -> tuple[Table, Mapping[str, tuple[int, ...]]]:
    table = architecture.table(json.loads(config))
    return table, hf_shapes(table)
