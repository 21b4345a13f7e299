"""The vLLM plugin. Without `RESHARDER_ENDPOINT` in the environment and `--load-format resharder` it changes nothing in vLLM.

Importing this module imports neither vLLM nor gRPC and opens no channel, because vLLM forks workers from
processes that imported it.
"""

import logging
import re
import uuid
from collections.abc import Sequence
from typing import Any

from resharder.client import settings

OLDEST = (0, 26)  # the first release with endpoint plugins
TESTED = ((0, 26), (0, 28), (0, 29), (0, 30), (0, 31), (0, 32))
"""Made by `python -m tools.releases_table` of what the tests have shown."""


def register() -> None:
    """Register the plugin: the entry point `vllm.general_plugins`, which vLLM calls at least once in every process of a server.

    Without RESHARDER_ENDPOINT, only the weight transfer backend is registered, which refuses a server without the variable, until
    vLLM is given the load format `resharder`: the variable then has its default.

    Raises:
        UsageError: vLLM is too old, a variable is invalid, or requests would bypass the gate. The
            exception ends the server's start.
    """
    from resharder.client.inference.vllm import weight_transfer
    from resharder.client.inference.vllm.engine_args import watch_engine_args

    has_backend = weight_transfer.register_backend()
    watch_engine_args(register)
    if not settings.ENDPOINT.text():
        return
    show_log()
    from resharder.client.errors import UsageError

    if settings.ON_CONFIG_CHANGE.text() == "exit" and not settings.SERVER_ID.text():
        raise UsageError(
            f"{settings.ON_CONFIG_CHANGE.name}=exit needs RESHARDER_SERVER_ID: a server that starts again is known by it"
        )
    settings.SERVER_ID.set_default(uuid.uuid4().hex)  # inherited by all processes of the server
    prefixes = settings.VLLM_RAY_PREFIXES.read()
    if "RESHARDER_" not in prefixes:
        settings.VLLM_RAY_PREFIXES.set(",".join([*prefixes, "RESHARDER_"]))
    from resharder.client.inference import version_page
    from resharder.client.inference.settings import PluginSettings
    from vllm import __version__

    if problem := too_old(__version__):
        raise UsageError(problem)
    if (warning := untested(__version__)) and settings.WARNED_OF_VLLM.text() != __version__:
        settings.WARNED_OF_VLLM.set(__version__)
        logging.getLogger("vllm.resharder").warning(warning)
    version_page.provide(PluginSettings.from_environment().server)
    from resharder.client.inference.vllm import (
        boot_loader,
        engine_core,
        outputs,
        refusals,
        sleep,
        worker_rpc,
    )
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.v1.worker.worker_base import WorkerBase

    if front_end := refusals.ungated_front_end():
        raise UsageError(f"Resharder does not support servers with {front_end}: start vLLM without it")
    if hasattr(WorkerBase, "resharder_describe"):
        return
    for method in worker_rpc.METHODS:
        setattr(WorkerBase, method.__name__, method)
    register_model_loader("resharder")(boot_loader.ResharderLoader)
    boot_loader.watch_loading()
    worker_rpc.watch_workers(sleep.watch_sleep)
    sleep.let_stay_paused()
    engine_core.fence_engine_core()
    outputs.watch_weight_version()
    if has_backend:
        weight_transfer.watch_engines(_attach)


async def _attach(engine: Any) -> None:
    from resharder.client.inference.vllm.attach import attach_until_shutdown

    await attach_until_shutdown(engine)


def show_log() -> None:
    """Show the log of the code that engines share as vLLM shows its own: it shows only loggers below `vllm`."""
    logging.getLogger("resharder.inference").parent = logging.getLogger("vllm")


def endpoint_plugin() -> Any:
    """Return the endpoint plugin: the entry point `vllm.endpoint_plugins`, which vLLM calls in API servers only."""
    from resharder.client.inference.vllm.endpoint import EndpointPlugin

    return EndpointPlugin()


def minor_of(version: str) -> tuple[int, int] | None:
    """Return (0, 32) for `0.32.0+cpu`; `None` for a build from a clone without tags (`0.1.dev1+g123`)."""
    found = re.match(r"(\d+)\.(\d+)(?!\.?dev)", version)
    return (int(found[1]), int(found[2])) if found else None


def too_old(version: str) -> str:
    """Return why the plugin does not support this vLLM version; empty if it does."""
    minor = minor_of(version)
    if minor is None or minor >= OLDEST:
        return ""
    return (
        f"vLLM {version} is not supported: this release of Resharder supports vLLM {_text(OLDEST)} and later, and is tested with "
        f"{in_words(TESTED)}. Install one of these"
    )


def untested(version: str) -> str:
    """Return the warning for a vLLM version without tests; empty for a tested one."""
    if minor_of(version) in TESTED:
        return ""
    return f"vLLM {version} is not tested with this release of Resharder, which is tested with {in_words(TESTED)}"


def in_words(minors: Sequence[tuple[int, int]]) -> str:
    """Return `0.26 and 0.28 to 0.32`."""
    runs = list[list[tuple[int, int]]]()
    for minor in minors:
        if runs and minor == (runs[-1][-1][0], runs[-1][-1][1] + 1):
            runs[-1].append(minor)
        else:
            runs.append([minor])
    named = [[f"{_text(run[0])} to {_text(run[-1])}"] if len(run) > 2 else map(_text, run) for run in runs]
    texts = [text for run in named for text in run]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
