"""megatron-core's GPTModel from a config.json, under any parallel layout: without memory for `resharder check`, and for tests.

torch.distributed must be initialised, with real ranks or with torch's "fake" process groups, which have ranks and sizes and
transfer nothing.
"""

from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from resharder.converters.allowances import refuse
from resharder.converters.architectures import architecture_of, table_of
from resharder.converters.architectures.checkpoint import HFConfig
from resharder.converters.architectures.recipe import Extras, Recipe
from resharder.converters.errors import UnsupportedModel
from resharder.converters.models.megatron.computation import activation
from resharder.converters.models.megatron.extras import change_model, change_specs
from resharder.converters.models.megatron.release import refuse_untested_release
from resharder.converters.models.megatron.tower import Wrapped, build_tower

Spec = Literal["local", "te"]
"""Megatron's own layers, or TransformerEngine's."""


def build_chunks(
    config: HFConfig,
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    cp: int = 1,
    spec: Spec = "local",
    dtype: torch.dtype = torch.float32,
    vocab_multiple: int = 1,
    device: str = "cpu",
    **overrides: Any,
) -> list[torch.nn.Module]:
    """Return this rank's chunks, one per virtual pipeline stage, in evaluation mode, with uninitialised weights.

    Sets up Megatron's process groups if they have other sizes.

    Args:
        config: Content of config.json.
        tp: Tensor-parallel ranks.
        pp: Pipeline-parallel ranks.
        vpp: Virtual pipeline stages per rank; None for one chunk.
        ep: Expert-parallel ranks.
        etp: Expert-tensor-parallel ranks; by default `tp` without expert parallelism and 1 with it.
        cp: Context-parallel ranks.
        spec: Megatron's own layers or TransformerEngine's.
        dtype: Dtype of the parameters.
        vocab_multiple: The vocabulary is padded to a multiple of `vocab_multiple * tp`, as in Megatron.
        device: torch device; "meta" for a model without memory.
        **overrides: Further arguments of TransformerConfig.

    Raises UnsupportedModel for a family without a recipe and an untested release, and the errors of megatron-core for a layout
    that it refuses.
    """
    refuse_untested_release()
    recipe = architecture_of(config).recipe(config)
    for value in recipe.beyond:
        refuse("config-mismatch", UnsupportedModel(f"config: {value}: megatron-core cannot compute with it"))
    etp = etp or (1 if ep > 1 else tp)
    _set_up_groups(tp, pp, vpp, cp, ep, etp)
    experts = "num_moe_experts" in recipe.transformer
    settings = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": vpp,
        "context_parallel_size": cp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "use_cpu_initialization": device == "cpu",
        "init_model_with_meta_device": device == "meta",
        "perform_initialization": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "sequence_parallel": spec == "te" and tp > 1 and experts,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "layernorm_zero_centered_gamma": recipe.transformer.get("layernorm_zero_centered_gamma", False) and spec == "te",
    }
    if experts:
        settings["moe_grouped_gemm"] = spec == "te"
    transformer = _transformer_config(recipe, settings | overrides)
    padding = vocab_multiple * tp
    vocab = -(-recipe.model["vocab_size"] // padding) * padding
    model = recipe.model | {"vocab_size": vocab}
    with torch.device(device):
        stages = [stage if vpp else None for stage in range(vpp or 1)]
        chunks = [_chunk(transformer, recipe.extras, model, spec, stage) for stage in stages]
        if recipe.tower is None:
            return chunks
        found = list[torch.nn.Module]()
        for chunk, stage in zip(chunks, stages, strict=True):
            has_tower = parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
            table, _ = table_of(config)
            tower = build_tower(recipe.tower, table, transformer, settings | overrides, spec == "te") if has_tower else None
            found.append(Wrapped(chunk, dict(tower.named_children()) if tower else {}).eval())
        for parameter in (parameter for chunk in found for parameter in chunk.parameters()):
            parameter.data = parameter.data.to(dtype)
        return found


def _set_up_groups(tp: int, pp: int, vpp: int | None, cp: int, ep: int, etp: int) -> None:
    """Set up Megatron's process groups, unless the existing ones have these sizes.

    Megatron never ends process groups, each of which has threads and sockets.
    """
    if parallel_state.model_parallel_is_initialized():
        now = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
        if now == (tp, pp, cp, ep, etp):
            parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )


class LatentAttention(DotProductAttention):  # type: ignore[misc]  # megatron-core has no types
    """megatron-core's own attention, for MLA in the local spec.

    In 0.16.1 MLA passes two widths that the constructor does not accept. Neither is needed: a recipe's `kv_channels` is the width
    of values.
    """

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


def _transformer_config(recipe: Recipe, settings: dict[str, Any]) -> Any:
    arguments = recipe.transformer | settings
    arguments["activation_func"] = activation(arguments["activation_func"])
    kind = MLATransformerConfig if arguments.get("multi_latent_attention") else TransformerConfig
    config = kind(**arguments)
    vars(config).update(recipe.attributes)
    return config


def _chunk(transformer: Any, extras: Extras, model: dict[str, Any], spec: Spec, stage: int | None) -> torch.nn.Module:
    te = spec == "te"
    if transformer.experimental_attention_variant is not None:
        layers = get_transformer_block_with_experimental_attention_variant_spec(transformer, vp_stage=stage)
        kinds = layers.layer_specs
    else:
        wanted = {"use_transformer_engine": te, "normalization": transformer.normalization, "vp_stage": stage}
        layers = get_gpt_decoder_block_spec(transformer, **wanted)
        kinds = get_gpt_decoder_layer_specs(transformer, **wanted)  # of the whole model: a stage may have MTP layers alone
    if transformer.multi_latent_attention and not te:
        for layer in (*layers.layer_specs, *kinds):
            layer.submodules.self_attention.submodules.core_attention = LatentAttention
    change_specs(layers.layer_specs, extras, transformer, te)
    mtp = {}
    if transformer.mtp_num_layers:
        mtp["mtp_block_spec"] = get_gpt_mtp_block_spec(transformer, kinds[-1], use_transformer_engine=te, vp_stage=stage)
    chunk = GPTModel(
        transformer,
        layers,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        parallel_output=True,
        vp_stage=stage,
        **mtp,
        **model,
    )
    for parameter in chunk.parameters():  # norms of the local spec are built in fp32; fp32 buffers keep their dtype
        parameter.data = parameter.data.to(transformer.params_dtype)
    change_model(chunk, extras)
    evaluated: torch.nn.Module = chunk.eval()
    return evaluated
