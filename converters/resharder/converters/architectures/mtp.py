"""Multi-token prediction (MTP): layers after the decoder's, each of which predicts one token further.

Each layer joins the norms of the next token's embedding and of the previous hidden state, projects them to the hidden size, runs
a decoder layer, and norms the result for the head that it shares with the decoder.
"""

from dataclasses import replace

from resharder.converters.architectures.blocks import Layer, Sizes, norm, placed, whole
from resharder.converters.architectures.table import HFConfig, Rows, Table, Weight


def further_tokens(config: HFConfig) -> int:
    """Return the number of MTP layers in the checkpoint."""
    return config.get("num_nextn_predict_layers") or 0


def prediction(embedding: str, hidden: str, final: str, projection: Weight, size: Sizes, layer: Layer) -> Layer:
    """Return an MTP layer around a decoder layer.

    Args:
        embedding: HF's name of the norm of the embedding.
        hidden: HF's name of the norm of the hidden state.
        final: HF's name of the norm of the result.
        projection: Projection from both to the hidden size.
        size: Sizes of the model.
        layer: Decoder layer inside.
    """
    norms = {"enorm.weight": embedding, "hnorm.weight": hidden, "final_layernorm.weight": final}
    parts: Layer = {key: (norm(f"{name}.weight", size),) for key, name in norms.items()}
    return parts | {"eh_proj.weight": (projection,)} | placed(layer, "transformer_layer.", "")


def with_predictions(table: Table, size: Sizes, config: HFConfig, layer: Layer) -> Table:
    """Return `table` with MTP layers as DeepSeek-V3 and GLM-4.5 store them.

    HF numbers them after the decoder's layers and stores a copy of embedding and head with each (README_WEIGHTS.md of
    DeepSeek-V3; GLM-4.6 leaves the copies out, vLLM PR 27597).
    """
    projection = whole("eh_proj.weight", size.hidden, 2 * size.hidden)
    part = prediction("enorm", "hnorm", "shared_head.norm", projection, size, layer)
    found, prefixes = dict(table), [f"model.layers.{size.layers + k}." for k in range(further_tokens(config))]
    for k, prefix in enumerate(prefixes):
        found |= placed(part, f"mtp.layers.{k}.", prefix)
    head = "embedding.word_embeddings.weight" if size.tied else "output_layer.weight"
    for key, name in (("embedding.word_embeddings.weight", "embed_tokens"), (head, "shared_head.head")):
        (weight,) = found[key]
        copies = [Rows(0, size.vocab, f"{prefix}{name}.weight") for prefix in prefixes]
        found[key] = (replace(weight, runs=(*weight.runs, *copies)),)
    return found
