"""What the processes of `vllm_engine` are forked from: vLLM is imported, nothing of it has been called, no thread runs.

The plugin is not imported here: vLLM calls it in each process, with that process's environment.
"""

import os
from importlib import import_module

from tests.support.forked import prepare
from tests.support.vllm_engine import ENVIRONMENT, PRELOADED

os.environ.update(ENVIRONMENT)

import torch

if torch.version.cuda is None:  # else it replaces torch.cuda's streams and events, which a GPU's worker needs
    for name in PRELOADED:
        import_module(name)
prepare()
