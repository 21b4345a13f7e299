"""The observer of a region accepts the weights of a step, and no others."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.chaos.region import has_weights
from tests.chaos.system import CONFIG
from tests.support.weights import random_weights


def test_a_folder_has_the_weights_of_its_step_alone(tmp_path: Path) -> None:
    weights = random_weights(CONFIG, 1, torch.bfloat16)
    save_file(weights, tmp_path / "model.safetensors")
    assert has_weights(str(tmp_path), CONFIG, 1)
    assert not has_weights(str(tmp_path), CONFIG, 2)
    name = max(weights, key=lambda name: weights[name].numel())
    weights[name].view(-1).view(torch.int16)[-1] ^= 1
    save_file(weights, tmp_path / "model.safetensors")
    assert not has_weights(str(tmp_path), CONFIG, 1)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors")
    assert not has_weights(str(tmp_path), CONFIG, 1)
