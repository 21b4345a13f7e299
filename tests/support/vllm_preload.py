"""What the processes of `vllm_engine` are forked from: vLLM is imported, nothing of it has been called, no thread runs.

The plugin is not imported here: vLLM calls it in each process, with that process's environment.
"""

import os

from tests.support.vllm_engine import ENVIRONMENT

os.environ.update(ENVIRONMENT)

import vllm.entrypoints.llm
import vllm.model_executor.models.registry
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401
