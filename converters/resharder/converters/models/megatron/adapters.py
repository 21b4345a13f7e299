"""LoRA adapters of Megatron-Bridge: placement from `sharded_state_dict`, meaning from the family's table of the base.

A wrapper has the base's linear as `to_wrap` and an `adapter`, which has `linear_in`, `linear_out`, `dim` and `alpha`
(megatron/bridge/peft/adapter_wrapper.py, lora_layers.py, utils.py, read against 0.6.2). They are known by these attributes.

The rows of `linear_out` are those of the base's linear, so its HF tensors divide them as they divide the base's: lora_B of q, k
and v are rows of one fused matrix. `linear_in` is lora_A of each of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from resharder.converters.adapter import PREFIX
from resharder.converters.architectures import architecture_of, table_of
from resharder.converters.architectures.checkpoint import HFConfig, PretrainedConfig, config_dict
from resharder.converters.architectures.table import Rows, Table, Weight
from resharder.converters.architectures.wrapped import is_wrapped
from resharder.converters.errors import UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import Layout
from resharder.converters.models.hf_names import Rename
from resharder.converters.models.megatron.layout import Chunks, adapter_layout, checked_modules
from resharder.converters.models.tensor_io import LookedUp

_WEIGHT = ".weight"
_LAYERS = "decoder.layers."
_ROUTER = "mlp.router"
_CANONICAL = (
    "the linears of CanonicalLoRA's adapters are apart, where Megatron's are fused: train with LoRA(target_modules="
    "['linear_qkv', 'linear_proj', 'linear_fc1', 'linear_fc2'])"
)
_DORA = "DoRA scales the base's weights by a magnitude, which vLLM does not: train with LoRA"
_SHARED_OUTER = "one half of it is all experts', which PEFT cannot name: train with experts_shared_outer_loras=False"
_ROUTED = "servers adapt no router: leave it out of target_modules"
_PREDICTING = "mtp."
_FURTHER = "servers adapt no layers that predict further tokens: leave them out, as target_modules=['*decoder.*.linear_qkv'] does"
_NORMED = (
    "the linear norms its output, and Megatron-Bridge adds the adapter's to it after the norm, servers before: leave it out of "
    "target_modules"
)
_UNFUSED = "it replaces a torch.nn.Linear, for which there is no placement: leave it out of target_modules"


@dataclass(frozen=True)
class MegatronAdapter:
    """The adapters in the chunks of a Megatron model, with their table."""

    config: Mapping[str, Any]
    """Content of adapter_config.json."""
    modules: Sequence[Any]
    table: Table

    def layout(
        self, config: Mapping[str, Any], *, rename: Rename | None = None, ranks: Sequence[int] | None = None
    ) -> tuple[Layout, LookedUp]:
        """Return this rank's layout of the adapters, and its local tensors by their names in the layout's pieces.

        Raises UnsupportedModel for `rename` and `ranks`, and as `megatron.layout.local_layout` does.
        """
        if rename is not None or ranks is not None:
            raise UnsupportedModel("rename and ranks are not for Megatron models: their table and process groups have both")
        try:
            return adapter_layout(self.modules, self.table)
        except UnknownTensor as error:
            raise UnsupportedModel(
                f"{error}: PEFT's folder has no name for it: leave its linear out of target_modules"
            ) from error


def find_adapter(chunks: Chunks, hf_config: HFConfig | PretrainedConfig) -> MegatronAdapter:
    """Return the adapters of a model's chunks. `hf_config` is the config of the base.

    Raises:
        UnsupportedModel: No adapter, or one of which servers compute something else; the message names the module.
        LayoutError: A model that is not built as the config says.
    """
    config = config_dict(hf_config)
    table, _ = table_of(config)
    if is_wrapped(table):
        raise UnsupportedModel(
            f"Megatron-Bridge's adapters of models with a tower ({config.get('model_type')!r}) are not supported: merge the "
            "adapter and publish the whole model"
        )
    modules = checked_modules(chunks, architecture_of(config).recipe(config))
    found = {name: adapter for module in modules for name, adapter in _adapters(module)}
    if not found:
        raise UnsupportedModel(
            "the model has no adapter on this rank: attach the chunks to which Megatron-Bridge's LoRA was applied"
        )
    sizes = {(adapter.dim, adapter.alpha): name for name, adapter in found.items()}
    if len(sizes) > 1:
        each = "; ".join(f"dim={dim} and alpha={alpha} at {name}" for (dim, alpha), name in sizes.items())
        raise UnsupportedModel(f"adapters have different sizes, {each}: train with one dim and normalize_moe_lora=False")
    ((rank, alpha),) = sizes
    adapted = {key: weights for key, weights in table.items() if _is_adaptable(key, weights)}
    leaves = {name.rpartition(".")[2] for name in found}
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:  # other stages may have adapted others
        leaves = {_stem(key).rpartition(".")[2] for key in adapted}
    targets = {
        run.tensor.removesuffix(_WEIGHT).rpartition(".")[2]
        for key, weights in adapted.items()
        if _stem(key).rpartition(".")[2] in leaves
        for run in weights[0].runs
    }
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.get("_name_or_path") or None,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    return MegatronAdapter(content, modules, _adapter_table(adapted, rank))


def _adapters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each adapted linear of a chunk, and its adapter. Raises UnsupportedModel for other kinds of adapters."""
    inside: set[torch.nn.Module] = set()
    for name, each in module.named_modules():
        adapter = getattr(each, "adapter", None)
        if not (hasattr(each, "to_wrap") and isinstance(adapter, torch.nn.Module)):
            if isinstance(each, torch.nn.Linear) and hasattr(each, "linear_in") and each not in inside:
                raise UnsupportedModel(f"{name} is a {type(each).__name__}: {_UNFUSED}")
            continue
        inside |= set(adapter.modules())
        if reason := _reason_against(name, each.to_wrap, adapter):
            raise UnsupportedModel(f"{name} is a {type(each).__name__} with a {type(adapter).__name__}: {reason}")
        yield name, adapter


def _reason_against(name: str, linear: Any, adapter: Any) -> str:
    """Return why servers would not compute with an adapter as the trainer does, and what to do; empty if they would."""
    if not (hasattr(adapter, "linear_in") and hasattr(adapter, "linear_out")):
        return _CANONICAL
    if hasattr(adapter, "weight_magnitude"):
        return _DORA
    if "SharedOuter" in type(adapter).__name__:
        return _SHARED_OUTER
    if name.endswith(_ROUTER):
        return _ROUTED
    if name.startswith(_PREDICTING):
        return _FURTHER
    if hasattr(linear, "post_layernorm"):
        return _NORMED
    activation = getattr(adapter, "activation", None)
    if activation is not None and not isinstance(activation, torch.nn.Identity):
        return f"it has the activation {type(activation).__name__} between its matrices: train with activation='identity'"
    return ""


def _stem(key: str) -> str:
    return key.removesuffix(_WEIGHT)


def _is_adaptable(key: str, weights: tuple[Weight, ...]) -> bool:
    """Return whether a line of the base's table is that of a linear layer whose adapters have names in PEFT's folder.

    Experts that HF stacks in one tensor have none.
    """
    plain = all(
        len(weight.shape) == 2 and weight.axis == 0 and not weight.transpose and all(run.index is None for run in weight.runs)
        for weight in weights
    )
    return plain and key.startswith(_LAYERS) and key.endswith(_WEIGHT) and not _stem(key).endswith(_ROUTER)


def _adapter_table(table: Table, rank: int) -> Table:
    """Return the table of all adapters that linears of the base may have."""
    found = {}
    for key, weights in table.items():
        found[f"{_stem(key)}.adapter.linear_in.weight"] = tuple(_first(weight, rank) for weight in weights)
        found[f"{_stem(key)}.adapter.linear_out.weight"] = tuple(_second(weight, rank) for weight in weights)
    return found


def _first(weight: Weight, rank: int) -> Weight:
    """Return `linear_in` of a linear: lora_A of each of its HF tensors."""
    runs = (Rows(0, rank, _peft(name, "lora_A")) for name in dict.fromkeys(run.tensor for run in weight.runs))
    return Weight((rank, weight.shape[1]), tuple(runs))


def _second(weight: Weight, rank: int) -> Weight:
    """Return `linear_out` of a linear: lora_B of its HF tensors, whose rows are those of the linear."""
    runs = (Rows(run.at, run.count, _peft(run.tensor, "lora_B"), run.first, run.step) for run in weight.runs)
    return Weight((weight.shape[0], rank), tuple(runs))


def _peft(tensor: str, half: str) -> str:
    return f"{PREFIX}{tensor.removesuffix(_WEIGHT)}.{half}{_WEIGHT}"
