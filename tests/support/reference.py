"""What transformers computes of a checkpoint: the decoder's logits and those of the layers that predict further tokens, from its
own modules for them (MtpModel), under the checkpoint's names."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support import megatron_models

# isort: split
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

from tests.support import tiny_hf


def difference(chunks: Sequence[torch.nn.Module], config: dict[str, Any], folder: Path, tokens: torch.Tensor) -> float:
    """The largest difference of any logit, at any depth, between Megatron and transformers; 0 on ranks that have no logits. Every
    rank calls it."""
    found = [megatron_models.logits(chunks, config, tokens, depth) for depth in range(1 + predictions(config))]
    if found[0] is None:
        return 0.0
    expected, length = logits(folder, tokens), tokens.shape[1]
    return max(float((found[k] - expected[k])[:, : length - k].abs().max()) for k in range(len(expected)))


def predictions(config: dict[str, Any]) -> int:
    """How many layers there are that predict further tokens."""
    return config.get("num_nextn_predict_layers") or 0


@torch.no_grad()
def logits(folder: Path, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Of the decoder, then of each further layer: [batch, length, vocab]. A layer sees tokens one further on than the one before
    it; past the end it sees token 0, as in megatron-core, so the last k logits of the k-th mean nothing."""
    model, config = tiny_hf.load_model(folder), json.loads((folder / "config.json").read_text())
    found = [model(tokens).logits]
    if not predictions(config):
        return found
    further, hidden = _further_layers(model, config, folder), model.get_decoder()(tokens).last_hidden_state
    positions = torch.arange(tokens.shape[1])[None]
    for layer in further.layers:
        tokens = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
        embedded = further.embed_tokens(tokens)
        rotary = further.rotary_emb(embedded, position_ids=positions)
        mask = create_causal_mask(further.config, embedded, None, past_key_values=None, position_ids=positions)
        hidden = layer(
            embedded, hidden, position_embeddings=rotary, attention_mask=mask, position_ids=positions, past_key_values=None
        )
        found.append(further.shared_head(hidden))
    return found


def _further_layers(model: PreTrainedModel, config: dict[str, Any], folder: Path) -> MtpModel:
    layers, count = config["num_hidden_layers"], predictions(config)
    if config["model_type"] == "mimo":
        return _further_layers_of_mimo(model, folder, count)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + k}\." for k in range(count)]  # what it looks for
    return MtpModel.from_pretrained(model).eval()


def _further_layers_of_mimo(model: PreTrainedModel, folder: Path, count: int) -> MtpModel:
    """transformers has no MiMo. What is its own is in vLLM's mimo_mtp.py: names, and the hidden state before the embedding."""
    model.config.num_mtp_layers, model.config.mtp_layer_types = count, ["full_attention"] * count
    model.config.mtp_hidden_states_first = True
    further = MtpModel(model, count).eval()
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "post_norm"}
    weights = {}
    for name, tensor in tiny_hf.load_checkpoint(folder).items():
        if name.startswith("model.mtp_layers."):
            number, part, *rest = name.removeprefix("model.mtp_layers.").split(".")
            inner = names.get(part) or f"mtp_block.{part}"
            weights[".".join([f"layers.{number}", inner, *rest])] = tensor
    missing, unexpected = further.load_state_dict(weights, strict=False)
    assert [name for name in missing if name.startswith("layers.")] == unexpected == []
    return further
