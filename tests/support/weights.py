"""Random weights of a model by its config alone, different for every step, and what they answer."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from resharder.converters.architectures.checkpoint import expected_shapes


def random_weights(config: Mapping[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """HF tensors large enough that the answers of two seeds differ clearly."""
    return dict(_random(config, seed, dtype))


def _random(config: Mapping[str, Any], seed: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in expected_shapes(config).items():
        # The generator looks at the low 32 bits of its seed only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        mean, deviation = (1.0, 0.1) if name.endswith("norm.weight") else (0.0, 0.1)
        yield name, (torch.randn(shape, generator=generator) * deviation + mean).to(dtype)


class Reference:
    """transformers' own model of a config with given weights: what a token's log-probability should be."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").float().eval()
        self._model.load_state_dict(dict(weights), strict=False)
        self._model.tie_weights()

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens) - 1, vocabulary]: of each possible next token after each prefix."""
        return self._model(torch.tensor([list(tokens)])).logits[0, :-1].float().log_softmax(-1)
