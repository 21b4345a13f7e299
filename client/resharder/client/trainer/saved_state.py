"""State of a trainer that must survive a generation: train modes and random number generators.

Each function saves the state and returns a function that restores it.
"""

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from resharder.converters.models.hf_names import roots_of

if TYPE_CHECKING:
    from resharder.converters.models.hf_names import Model


def keeping(model: "Model | None") -> tuple[Callable[[], Callable[[], None]], ...]:
    """Return the functions that save the state of a trainer with this model."""
    return keep_rng, partial(eval_mode, roots_of(model) if model is not None else [])


def eval_mode(roots: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Set eval mode, and return a function that restores `training` of each module.

    A trainer may have frozen parts in eval mode.
    """
    modes = [(module, module.training) for root in roots for module in root.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    for root in roots:
        root.eval()
    return restore


def keep_rng() -> Callable[[], None]:
    """Save the generators of Python, numpy and torch, of the host and all GPUs, and Megatron's tracker, if there is one."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    restore_tracker = _keep_tracker()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        for number, state in enumerate(gpus):
            torch.cuda.set_rng_state(state, number)
        restore_tracker()

    return restore


def _keep_tracker() -> Callable[[], None]:
    """Save the tracker's states: tensors that it replaces or, with CUDA graphs, generators that it advances."""
    module: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker: Any = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)  # Megatron's function would create a tracker
    if tracker is None or not tracker.is_initialized():
        return lambda: None
    states = tracker.get_states()
    positions = {name: s.get_state() if isinstance(s, torch.Generator) else s.clone() for name, s in states.items()}

    def restore() -> None:
        for name, state in states.items():
            if isinstance(state, torch.Generator):
                state.set_state(positions[name])
        tracker.set_states({name: s if isinstance(s, torch.Generator) else positions[name] for name, s in states.items()})

    return restore
