"""Damaged distributed checkpoints of Megatron (`torch_dist`), and the code that imports them."""

import shutil
from pathlib import Path
from random import Random
from typing import Any

from tests.support import fakepg, tiny_hf
from tests.support.hostile_files import ACCEPTED, Workspace, spoil
from tests.support.megatron_models import build_model

# isort: split
import numpy as np
from megatron.core import dist_checkpointing, parallel_state
from resharder.converters.errors import ConversionError
from resharder.converters.models.megatron.torch_dist import open_torch_dist

_CONFIG = tiny_hf.tiny_config("llama", num_hidden_layers=2, vocab_size=96)


def _saved(folder: Path) -> Path:
    """Save a model as the only rank of a world does."""
    fakepg.enter(0, 1)
    try:
        chunks = build_model(_CONFIG, vocab_multiple=32)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        (state,) = (chunk.sharded_state_dict(metadata={"dp_cp_group": group}) for chunk in chunks)
        dist_checkpointing.save({"model0": state, "iteration": 5}, str(folder))
    finally:
        fakepg.leave()
    return folder


def _pickle_spoiled(random: Random, content: bytes) -> bytes:
    """Return a pickle with another number, name or operation somewhere, which often still loads."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed))
        codes = b"K\x00\x01\xff(.NR]}tb\x85\x87"
        changed[at] = random.choice((random.randrange(256), *codes, changed[random.randrange(len(changed))]))
    return bytes(changed)


def torch_dist(random: Random, workspace: Workspace) -> str:
    """Open a checkpoint, and read all of its tensors."""
    folder = workspace.fresh() / "checkpoint"
    shutil.copytree(workspace.once("torch_dist", _saved), folder)
    path = random.choice([folder / ".metadata", folder / ".metadata", *sorted(folder.iterdir())])
    chance = random.random()
    if chance < 0.1:
        path.unlink()
    elif path.name == ".metadata" and chance < 0.8:
        path.write_bytes(_pickle_spoiled(random, path.read_bytes()))
    else:
        path.write_bytes(spoil(random, path.read_bytes()))
    try:
        with open_torch_dist(folder, _CONFIG) as opened:
            left: dict[str, Any] = {name: np.zeros(spec.shape, np.uint8) for name, spec in opened.layout.tensors.items()}
            for name, index, part in opened.items():
                assert left[name][index].shape == tuple(part.shape), f"{name}: a part of shape {tuple(part.shape)}"
                left[name][index] += 1
    except ConversionError as error:
        return type(error).__name__
    assert all((each == 1).all() for each in left.values()), "not every element is read once"
    return ACCEPTED
