"""A running model in the format of its load, without an engine."""

from collections.abc import Iterable

import torch
from resharder.client.inference.recording.recorder import record
from resharder.client.inference.vllm.reload import format_of_load, original_loader
from resharder.converters.geometry.layout import TensorSpec
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading


class Tied(torch.nn.Module):
    """A checkpoint has the embedding alone, as of models with `tie_word_embeddings`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(6, 4)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            weight: torch.nn.Parameter = self.embed.weight
            getattr(weight, "weight_loader", torch.Tensor.copy_)(weight, tensor)


def test_a_tied_parameter_is_written_wherever_it_is_read() -> None:
    model = Tied().requires_grad_(False)
    model.embed.weight.weight_loader = lambda param, loaded_weight: param.data.copy_(loaded_weight)
    record_metadata_for_reloading(model)
    specs = {"embed.weight": TensorSpec("embed.weight", "F32", (6, 4))}
    new = record(model, specs, original_loader)
    weight = model.embed.weight
    with format_of_load(model):
        assert model.embed.weight.is_meta
        running = record(model, specs, original_loader)
    assert running == new
    assert running.unwritten == {}
    assert running.locals["embed.weight"].modules == ("embed", "head")
    assert model.embed.weight is weight
    assert model.head.weight is weight
