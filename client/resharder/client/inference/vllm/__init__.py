"""The vLLM plugin. Importing it imports neither vLLM nor gRPC and opens nothing: workers are forked from processes that did.

Without RESHARDER_ENDPOINT in the environment it does nothing.
"""

import logging
import os
import uuid
from typing import Any

_RAY_PREFIXES = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_WARNED = "RESHARDER_WARNED_OF_VLLM"  # inherited, so that one process of a server says it once


def register() -> None:
    """Entry point `vllm.general_plugins`: called in every process of a server, and more than once in some.

    Raises UsageError, which ends the server's start, for a vLLM that is too old, a wrong environment, and a server whose requests
    would not pass the gate.
    """
    if not os.environ.get("RESHARDER_ENDPOINT"):
        return
    os.environ.setdefault("RESHARDER_SERVER_ID", uuid.uuid4().hex)  # inherited by all processes of the server
    prefixes = [prefix for prefix in os.environ.get(_RAY_PREFIXES, "").split(",") if prefix]
    if "RESHARDER_" not in prefixes:
        os.environ[_RAY_PREFIXES] = ",".join([*prefixes, "RESHARDER_"])
    from resharder.client.errors import UsageError
    from resharder.client.inference import version_page
    from resharder.client.inference.settings import Settings
    from resharder.client.inference.vllm import versions
    from vllm import __version__

    if problem := versions.too_old(__version__):
        raise UsageError(problem)
    if (warning := versions.untested(__version__)) and os.environ.get(_WARNED) != __version__:
        os.environ[_WARNED] = __version__
        logging.getLogger("vllm.resharder").warning(warning)
    version_page.provide(Settings.from_environment().server)
    from resharder.client.inference.vllm import boot_loader, compat, worker_rpc
    from vllm.v1.worker.worker_base import WorkerBase

    if front_end := compat.ungated_front_end():
        raise UsageError(f"Resharder does not install into servers with {front_end}: start vLLM without it")
    if getattr(WorkerBase, "resharder_describe", None) is worker_rpc.resharder_describe:
        return
    for method in worker_rpc.METHODS:
        setattr(WorkerBase, method.__name__, method)
    compat.register_model_loader("resharder")(boot_loader.ResharderLoader)
    compat.watch_loading()
    compat.watch_workers(worker_rpc.watch_sleep)
    compat.let_stay_paused()
    compat.fence_engine_core()


def endpoint_plugin() -> Any:
    """Entry point `vllm.endpoint_plugins`: called in the API server alone."""
    from resharder.client.inference.vllm.endpoint import EndpointPlugin

    return EndpointPlugin()
