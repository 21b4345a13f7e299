"""Logits of Megatron, filled through the layout, against those of transformers."""

from pathlib import Path
from typing import Any

import torch

from tests.support import fakepg, reference, tiny_hf
from tests.support.megatron_models import Spec, build_model, fill_from_hf
from tests.support.megatron_rebuild import Model


def difference(model: Model, folder: Path, spec: Spec, **overrides: Any) -> float:
    """The largest difference of any logit between Megatron, filled through the layout, and transformers."""
    config, checkpoint = model
    tokens = torch.randint(0, tiny_hf.words(config), (2, 24), generator=torch.Generator().manual_seed(5))
    fakepg.enter(0, 1)
    chunks = build_model(config, spec=spec, **overrides)
    fill_from_hf(chunks, config, checkpoint, padding=float("nan"))
    return reference.difference(chunks, config, folder, tokens)
