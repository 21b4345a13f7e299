"""Families by parallel layouts, hundreds of them: every rank of each world in one process, element by element.

Ranks are filled as megatron-core's checkpoint loader fills them: from the whole model's tensors, by the key and offset of each
sharded tensor, the halves of a factory merged by the factory itself. So layouts are compared with Megatron's own reading of
`sharded_state_dict`, not with themselves; what the whole model's tensors mean is proven by logits (test_megatron.py). Rows of
padding hold NaN. The cases follow from the family's name alone; the name of one that fails reruns it (`pytest -k`).
"""

import random
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import LEGACY_EXPERTS, build_model, fill_from_hf, wrap_ddp, wrap_float16
from tests.support.variants import variants

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from resharder.converters.architectures import architecture_of
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.geometry.layout import box_index, format_box
from resharder.converters.models.megatron.layout import local_layout, local_pieces
from resharder.converters.models.tensor_io import read_piece

pytestmark = [pytest.mark.slow, pytest.mark.compat("layouts")]

Settings = dict[str, Any]
Tensors = dict[str, torch.Tensor]

CASES, FEW = 360, 16
LARGEST_WORLD = 16
VOCABULARY = 203
WRAPPERS = {
    "bare": lambda chunks: chunks,
    "float16": wrap_float16,
    "ddp": wrap_ddp,
    "ddp-float16": lambda chunks: wrap_ddp(wrap_float16(chunks)),
    "ddp-overlap": lambda chunks: wrap_ddp(chunks, overlap=True),
}
EXPERTS: dict[str, Settings] = {
    "sequential": {"spec": "local"},
    "legacy": {"spec": "local", "moe_grouped_gemm": True},
    "te-grouped": {"spec": "te"},
    "te-sequential": {"spec": "te", "moe_grouped_gemm": False},
}

NO_CONTEXT_PARALLELISM = {
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_vl", "gpt_oss"), "attention of megatron-core's own"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), "YaRN pins memory, which needs a GPU"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_vl", "qwen3_5_moe_vl"), "gated delta net"),
}


def transformer_of(family: str) -> Mapping[str, Any]:
    config = tiny_hf.tiny_config(family)
    return architecture_of(config).recipe(config).transformer


def pipelines(layers: int, mtp: int) -> Iterator[Settings]:
    """Ways to spread layers, embedding, loss and MTP over pipeline stages."""
    yield {}
    for pp, vpp in ((2, None), (2, 2), (4, None)):
        if layers % (pp * (vpp or 1)) == 0:
            yield {"pp": pp, "vpp": vpp}
    yield {"pp": 2, "num_layers_in_first_pipeline_stage": 1}
    yield {"pp": 2, "num_layers_in_last_pipeline_stage": 1}
    yield {"pp": 3, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}
    for embedding, loss in ((True, False), (False, True), (True, True)):
        slots = layers + embedding + loss
        for pp, vpp in product(range(2, slots + 1), (None, 2, 3)):
            if slots % (pp * (vpp or 1)) == 0:
                yield {
                    "pp": pp,
                    "vpp": vpp,
                    "account_for_embedding_in_pipeline_split": embedding,
                    "account_for_loss_in_pipeline_split": loss,
                }
    t, m = "t" * layers, "m" * mtp
    yield stages(3, "E" + t[:1], t[1:-1], t[-1:] + m + "L")
    yield stages(4, "E", t[:-1], t[-1:] + m, "L")
    yield stages(2, "E", t[:2], t[2:], m + "L")
    yield stages((layers + 2) // 2, "E", *t[: layers // 2 * 2 - 1], t[layers // 2 * 2 - 1 :], m + "L")
    if mtp:
        yield stages(4, "E", t, m, "L")
    words = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    yield stages(2, "E" + t[:1], t[1:] + m + "L") | {
        "pipeline_model_parallel_layout": [[words[c] for c in stage] for stage in ("E" + t[:1], t[1:] + m + "L")]
    }


def stages(pp: int, *names: str) -> Settings:
    vpp = len(names) // pp
    return {"pp": pp, "vpp": vpp if vpp > 1 else None, "pipeline_model_parallel_layout": "|".join(names)}


def tensor_parallel(transformer: Mapping[str, Any]) -> list[int]:
    """Sizes that megatron-core takes for a family: every count of heads and the widths of its MLPs divide by them. (Its local
    spec has neither sequence nor context parallelism.)"""
    names = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads", "ffn_hidden_size")
    counts = [transformer[name] for name in (*names, "moe_shared_expert_intermediate_size") if transformer.get(name)]
    return [tp for tp in (1, 2, 4, 8) if all(count % tp == 0 for count in counts)]


def expert_parallel(transformer: Mapping[str, Any], ranks: int) -> list[tuple[int, int]]:
    """(EP, ETP) for `ranks` of one pipeline stage. megatron-core cuts no experts with biases."""
    experts, ffn = transformer["num_moe_experts"], transformer["moe_ffn_hidden_size"]
    return [
        (ep, etp)
        for ep, etp in product((1, 2, 4, 8), (1, 2, 4))
        if experts % ep == 0 and ranks % (ep * etp) == 0 and ffn % etp == 0 and not (etp > 1 and transformer["add_bias_linear"])
    ]


def kinds(transformer: Mapping[str, Any]) -> list[Settings]:
    """Layer specs and, where there are experts, the modules that hold them. Legacy GroupedMLP takes no biases."""
    if not transformer.get("num_moe_experts"):
        return [{"spec": "local"}, {"spec": "te"}]
    return [kind for name, kind in EXPERTS.items() if name != "legacy" or (LEGACY_EXPERTS and not transformer["add_bias_linear"])]


def cases(family: str, count: int) -> list[tuple[str, Settings]]:
    """Distinct cases of a family, by name: always the same for a name and a count."""
    transformer, draw = transformer_of(family), random.Random(family)
    pipeline = list(pipelines(transformer["num_layers"], transformer.get("mtp_num_layers") or 0))
    groups = [] if transformer.get("multi_latent_attention") else [1, 2, transformer["num_query_groups"]]
    found: dict[str, Settings] = {}
    while len(found) < count:
        layout = dict(draw.choice(pipeline))
        kind, wrapper = draw.choice(kinds(transformer)), draw.choice(["bare", "bare", "bare", *WRAPPERS])
        te = kind["spec"] == "te"
        contexts = [1, 2] if te and family not in NO_CONTEXT_PARALLELISM else [1]
        tp, cp, dp = draw.choice(tensor_parallel(transformer)), draw.choice(contexts), draw.choice([1, 1, 1, 2, 3])
        world = tp * cp * dp * layout.get("pp", 1)
        if world > LARGEST_WORLD:
            continue
        layout |= kind | {"tp": tp, "cp": cp, "vocab_multiple": draw.choice([1, 1, 8, 128])}
        if transformer.get("num_moe_experts"):
            layout["ep"], layout["etp"] = draw.choice(expert_parallel(transformer, tp * cp * dp))
        layout["sequence_parallel"] = te and tp > 1 and draw.choice([True, False])
        case: Settings = {"world": world, "wrapper": wrapper, "layout": layout, "changes": {}}
        if groups and (few := draw.choice(groups)) != transformer["num_query_groups"]:
            case["changes"] = {"num_key_value_heads": few}
        found[name_of(family, case, dp)] = case
    return list(found.items())


SHORT = {
    "num_layers_in_first_pipeline_stage": "first",
    "num_layers_in_last_pipeline_stage": "last",
    "account_for_embedding_in_pipeline_split": "account-E",
    "account_for_loss_in_pipeline_split": "account-L",
    "pipeline_model_parallel_layout": "",
    "vocab_multiple": "pad",
    "moe_grouped_gemm": "grouped",
    "sequence_parallel": "sp",
    "spec": "",
    "num_key_value_heads": "kv",
}


def name_of(family: str, case: Settings, dp: int) -> str:
    parts = [family, f"dp{dp}", case["wrapper"]]
    for key, value in (case["layout"] | case["changes"]).items():
        if isinstance(value, list):
            value = ",".join("".join(word[0] for word in stage) for stage in value)
        if value not in (None, False, 1) or value is True:
            parts.append(SHORT.get(key, key) + ("" if value is True else str(value)))
    return "-".join(parts)


MATRIX = {name: (family, case) for family in tiny_hf.ALL for name, case in cases(family, -(-CASES // len(tiny_hf.ALL)))}


@lru_cache
def checkpoint_of(family: str, changes: tuple[tuple[str, int], ...]) -> tuple[Settings, Tensors]:
    """A config and its weights: multiples of 1/64 below 2, which every dtype holds, with a norm's one added or not. What HF
    stores twice is the same."""
    config = tiny_hf.tiny_config(family, vocab_size=VOCABULARY, **dict(changes))
    weights = {}
    for name, shape in expected_shapes(config).items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weights[name] = torch.randint(-127, 128, shape, generator=generator) / 64
    fakepg.enter(0, 1)
    chunks = build_model(config)
    fill_from_hf(chunks, config, weights)
    for name, index, values in local_pieces(chunks, config):
        weights[name][index] = values
    return config, weights


@lru_cache
def whole_of(family: str, changes: tuple[tuple[str, int], ...], spec: str, grouped: bool | None) -> Tensors:
    """The tensors of the whole model, by Megatron's keys."""
    config, weights = checkpoint_of(family, changes)
    fakepg.enter(0, 1)
    experts = {} if grouped is None else {"moe_grouped_gemm": grouped}
    chunks = build_model(config, spec=spec, **experts)  # type: ignore[arg-type]
    fill_from_hf(chunks, config, weights)
    whole: Tensors = {}
    for value in sharded_state(chunks[0]).values():
        for shard in shards_of(value.build() if isinstance(value, ShardedTensorFactory) else value):
            full = whole.setdefault(shard.key, torch.full(shard.global_shape, torch.nan))
            full[shard.global_slice()] = shard.data.detach()
    return whole


def sharded_state(chunk: Any) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = chunk.sharded_state_dict(metadata={"dp_cp_group": group, "non_homogeneous_layers": True})
    return {name: value for name, value in state.items() if not isinstance(value, ShardedObject)}


def shards_of(built: Any) -> list[ShardedTensor]:
    if isinstance(built, ShardedTensor):
        return [built]
    return [shard for item in (built.values() if isinstance(built, dict) else built) for shard in shards_of(item)]


def loaded(built: Any, whole: Tensors) -> Any:
    """What a sharded tensor, or a structure of them, should hold. Past the end of the whole tensor there is padding: NaN."""
    if isinstance(built, dict):
        return {key: loaded(value, whole) for key, value in built.items()}
    if isinstance(built, list):
        return [loaded(value, whole) for value in built]
    values = torch.full(built.local_shape, torch.nan)
    there = whole[built.key][built.global_slice()]
    values[tuple(slice(0, n) for n in there.shape)] = there
    return values


@torch.no_grad()
def load(chunks: list[torch.nn.Module], whole: Tensors) -> None:
    for chunk in chunks:
        for value in sharded_state(chunk).values():
            factory = isinstance(value, ShardedTensorFactory)
            found = value.merge_fn(loaded(value.build(), whole)) if factory else loaded(value, whole)
            value.data.copy_(found)


@pytest.mark.parametrize(
    "name", variants({n: {"family": f, "wrapper": c["wrapper"], **c["layout"]} for n, (f, c) in MATRIX.items()}, FEW)
)
def test_every_rank_holds_what_its_pieces_say_and_each_element_has_one_owner(name: str) -> None:
    family, case = MATRIX[name]
    layout, changes = case["layout"], tuple(case["changes"].items())
    config, weights = checkpoint_of(family, changes)
    whole = whole_of(family, changes, layout["spec"], layout.get("moe_grouped_gemm"))
    dtype = torch.bfloat16 if "float16" in case["wrapper"] else torch.float32
    owners = {tensor: torch.zeros(values.shape, dtype=torch.int8) for tensor, values in weights.items()}
    owned, replicated = set(), set()
    for rank in range(case["world"]):
        fakepg.enter(rank, case["world"])
        chunks = WRAPPERS[case["wrapper"]](build_model(config, dtype=dtype, **layout))
        load(chunks, whole)
        held, tensors = local_layout(chunks, config)
        for piece in held.pieces:
            values, index = read_piece(tensors, piece), box_index(piece.box)
            same = torch.equal(values.float(), weights[piece.tensor][index])
            assert same, f"rank {rank}: {piece.local} does not hold {piece.tensor}{format_box(piece.box)}"
            (replicated if piece.replica else owned).add((piece.tensor, piece.box))
            if not piece.replica:
                owners[piece.tensor][index] += 1
    assert [tensor for tensor, times in owners.items() if not bool((times == 1).all())] == []
    assert replicated <= owned


def test_the_matrix_has_every_kind_of_layout() -> None:
    used = Counter[str]()
    for _, case in MATRIX.values():
        layout = case["layout"]
        sizes = {key for key, value in layout.items() if key in ("tp", "pp", "vpp", "cp", "ep", "etp") and (value or 1) > 1}
        used.update(sizes | {key for key, value in layout.items() if key in SHORT and value})
        used.update([case["wrapper"], *case["changes"]])
        used["padding only"] += layout["vocab_multiple"] * layout["tp"] >= 2 * VOCABULARY
        used["fewer groups than ranks"] += case["changes"].get("num_key_value_heads", 8) < layout["tp"]
        used["virtual stages of a layout"] += "pipeline_model_parallel_layout" in layout and bool(layout["vpp"])
        used["expert tensor parallel of its own"] += layout.get("etp", 1) not in (1, layout["tp"])
        used["legacy experts"] += layout["spec"] == "local" and layout.get("moe_grouped_gemm", False)
    kinds_of_layout = set(WRAPPERS) | {"tp", "pp", "vpp", "cp", "ep", "etp", *SHORT}
    if not LEGACY_EXPERTS:
        del used["legacy experts"]
        kinds_of_layout.remove("moe_grouped_gemm")  # only they set it
    assert len(MATRIX) >= 300
    assert kinds_of_layout <= set(used)
    assert min(used.values()) >= 5, used
