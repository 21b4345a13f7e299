"""What a trainer must find again as it left it: train modes and the states of random number generators.

Each function takes the state down and returns what restores it.
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


def eval_mode(roots: Sequence[torch.nn.Module]) -> Callable[[], None]:
    """Restores `training` of every module by itself: a trainer may keep frozen parts in eval mode."""
    modes = [(module, module.training) for root in roots for module in root.modules()]

    def restore() -> None:
        for module, training in modes:
            module.training = training

    for root in roots:
        root.eval()
    return restore


def keep_rng() -> Callable[[], None]:
    """Python's, numpy's, torch's on the host and on every GPU, and Megatron's tracker's, where there is one."""
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
    """Its states are tensors, which it replaces, or with CUDA graphs generators, which go on."""
    module: Any = sys.modules.get("megatron.core.tensor_parallel.random")
    tracker: Any = getattr(module, "_CUDA_RNG_STATE_TRACKER", None)  # the function that returns it would make one
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
