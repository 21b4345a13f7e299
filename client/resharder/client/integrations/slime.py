"""slime's weight updater `resharder`; read against slime 0.3.1 (`slime/backends/megatron_utils/actor.py`, `initialize.py`).

    export RESHARDER_ENDPOINT=daemon:7677 RESHARDER_MODEL=policy SGLANG_PLUGINS=resharder RESHARDER_UNREACHABLE=prefer
    python train.py … --custom-megatron-init-path resharder.client.integrations.slime.install

Every Megatron rank publishes its shards, and slime's own SGLang servers, which inherit the variables, install the version.
Importing this module imports nothing of slime.
"""

from importlib import import_module
from typing import Any

from resharder.client.errors import UsageError
from resharder.client.integrations.vime import ResharderWeightUpdater

__all__ = ["install"]

_DEFAULTS = {"update_weight_mode": "full", "update_weight_transport": "nccl"}


def install(args: Any) -> None:
    """Have slime's actor of this process publish. slime calls this on every rank before it builds the model.

    Raises:
        UsageError: The job would make another updater than the one that is replaced, because of an option.
    """
    wrong = ["--colocate"] if args.colocate else []
    wrong += [f"--{name.replace('_', '-')}" for name, value in _DEFAULTS.items() if getattr(args, name, value) != value]
    if wrong:
        raise UsageError(f"slime sends weights by itself with {' and '.join(wrong)}: leave that out")
    actor: Any = import_module("slime.backends.megatron_utils.actor")
    actor.UpdateWeightFromDistributed = ResharderWeightUpdater
