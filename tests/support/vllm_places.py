"""Modules of vLLM's entry points that have had another place in each of its releases."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any


def cli_args() -> Any:
    """The options of `vllm serve`; 0.33, 0.32, 0.28."""
    return first_of("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")


def startup() -> Any:
    """Return the module with `cli_env_setup`, which vLLM 0.33, 0.28 and 0.26 have in three places."""
    return first_of("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils", "vllm.entrypoints.utils")


def first_of(*modules: str) -> Any:
    return import_module(next(name for name in modules if exists(name)))


def exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # nor its package
        return False
