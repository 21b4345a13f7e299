"""GPTModel chunks on CPU, under any parallel layout: real ranks (torchrun, gloo) or fake ones (`fakepg`).

dist.init_process_group("gloo")
chunks = build_model(config, tp=2, pp=2)
fill_from_hf(chunks, config, load_checkpoint(folder))
scores = token_logprobs(chunks, config, tokens)  # on the last pipeline stage, None elsewhere
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support import megatron_shim  # noqa: F401

# isort: split
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import package_info
from megatron.core import parallel_state as state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import gpt_model
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from resharder.converters.geometry.layout import box_index
from resharder.converters.models.megatron.build import Spec, build_chunks
from resharder.converters.models.megatron.layout import local_layout
from resharder.converters.models.tensor_io import write_piece

from tests.support.tiny_hf import text_of

__all__ = [
    "LEGACY_EXPERTS",
    "UNBUILT",
    "VERSION",
    "Spec",
    "build_model",
    "fill_from_hf",
    "legacy_experts",
    "logits",
    "token_logprobs",
    "wrap_ddp",
    "wrap_float16",
]

Config = Mapping[str, Any]
VERSION = package_info.__version__.partition("+")[0]
"""Since 0.19, megatron-core adds the commit of whatever repository its folder is in."""
RELEASE = tuple(map(int, VERSION.split(".")[:2]))
UNBUILT = frozenset({"deepseek_v2_lite"} if RELEASE >= (0, 19) else ())
"""Families that this release of megatron-core cannot build: since 0.19, latent attention that norms keys norms queries too."""

LEGACY_EXPERTS = hasattr(TransformerConfig, "moe_use_legacy_grouped_gemm")
legacy_experts = pytest.mark.skipif(not LEGACY_EXPERTS, reason="megatron-core has no legacy GroupedMLP since 0.17")


def build_model(config: Config, **arguments: Any) -> list[torch.nn.Module]:
    """`build_chunks`. A test of a family that this release cannot build is skipped."""
    if UNBUILT and "kv_lora_rank" in config and config["q_lora_rank"] is None:
        pytest.skip("megatron-core norms queries wherever it norms keys since 0.19")
    return build_chunks(config, **arguments)


def wrap_float16(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """In Float16Module, as Megatron's bf16 training has them."""
    wrapped: list[torch.nn.Module] = []
    for chunk in chunks:
        transformer: TransformerConfig = chunk.config
        transformer.bf16 = True
        wrapped.append(Float16Module(transformer, chunk).eval())
    return wrapped


def wrap_ddp(chunks: Sequence[torch.nn.Module], *, overlap: bool = False) -> list[torch.nn.Module]:
    """In Megatron's DDP; with `overlap` as a distributed optimizer has it that gathers parameters in the next forward."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=overlap, overlap_param_gather=overlap, overlap_grad_reduce=overlap
    )
    return [DistributedDataParallel(chunk.config, settings, chunk) for chunk in chunks]


@torch.no_grad()
def fill_from_hf(
    chunks: Sequence[torch.nn.Module], config: Config, checkpoint: Mapping[str, torch.Tensor], padding: float = 0.0
) -> None:
    """Loads a checkpoint, as far as this rank holds it. Padded rows of the vocabulary are filled with `padding`."""
    layout, tensors = local_layout(chunks, config)
    for tensor in tensors.values():
        tensor.fill_(padding)
    for piece in layout.pieces:
        write_piece(tensors, piece, checkpoint[piece.tensor][box_index(piece.box)])


@torch.no_grad()
def logits(chunks: Sequence[torch.nn.Module], config: Config, tokens: torch.Tensor, depth: int = 0) -> torch.Tensor | None:
    """Megatron's forward of `tokens` [batch, length]: [batch, length, vocab] on ranks of the last pipeline stage, None on
    others. Every rank calls it, with the same tokens. With `depth`, those of that MTP layer, counted from 1."""
    transformer: TransformerConfig = chunks[0].config
    predictions = transformer.mtp_num_layers
    if not hasattr(gpt_model, "process_mtp_loss"):  # before 0.17
        transformer.mtp_num_layers = None  # else it wants labels, and returns a loss
    tp, pp = state.get_tensor_model_parallel_world_size(), state.get_pipeline_model_parallel_world_size()
    length = tokens.shape[1]
    inputs = F.pad(tokens, (0, -length % tp))
    batch, padded = inputs.shape
    positions = torch.arange(padded).expand(batch, padded)
    future = torch.ones(1, 1, padded, padded, dtype=torch.bool).triu(1)
    part = padded // (tp if transformer.sequence_parallel else 1)
    last = len(chunks) * pp - 1
    output = None
    for number, chunk in enumerate(chunks):
        stage = number * pp + state.get_pipeline_model_parallel_rank()
        if stage > 0:
            hidden = torch.empty(part, batch, transformer.hidden_size, dtype=transformer.pipeline_dtype)
            dist.recv(hidden, state.get_pipeline_model_parallel_prev_rank())
            _inner(chunk).set_input_tensor(hidden)
        with _all_depths():
            output = chunk(inputs, positions, future)
        if stage < last:
            dist.send(output.contiguous(), state.get_pipeline_model_parallel_next_rank())
            output = None
    transformer.mtp_num_layers = predictions
    if output is None:
        return None
    parts = [torch.empty_like(output) for _ in range(tp)] if tp > 1 else [output]
    if tp > 1:
        dist.all_gather(parts, output.contiguous(), group=state.get_tensor_model_parallel_group())
    by_depth = torch.cat(parts, -1).unflatten(1, (-1, 1 + (predictions or 0), part))  # sequence parallel ranks come first
    return by_depth[:, :, depth].flatten(1, 2)[:, :length, : text_of(config)["vocab_size"]]


@contextmanager
def _all_depths() -> Iterator[None]:
    """Keep the hidden states of MTP layers for the output layer. Since 0.17 GPTModel drops them after their loss."""
    process = getattr(gpt_model, "process_mtp_loss", None)
    if process is not None:
        gpt_model.process_mtp_loss = lambda hidden_states, **given: hidden_states
    try:
        yield
    finally:
        if process is not None:
            gpt_model.process_mtp_loss = process


def token_logprobs(chunks: Sequence[torch.nn.Module], config: Config, tokens: torch.Tensor) -> torch.Tensor | None:
    """Log-probability of each token after the first, [batch, length - 1] in fp32, as `logits` says where."""
    scores = logits(chunks, config, tokens)
    if scores is None:
        return None
    return scores[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def _inner(module: torch.nn.Module) -> torch.nn.Module:
    return _inner(module.module) if hasattr(module, "module") else module
