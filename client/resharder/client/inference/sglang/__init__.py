"""The SGLang plugin. Without `RESHARDER_ENDPOINT` in the environment it changes nothing in SGLang.

SGLang only logs an exception of a plugin and goes on without it. A server that was to follow the daemon would then serve
weights that nobody named, so `register` ends the process instead.
"""

import logging
import re
import sys
import uuid

from resharder.client import settings

OLDEST = (0, 5, 17)
TESTED = ((0, 5, 17), (0, 5, 23))
_SCHEDULER, _DETOKENIZER = "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"
_FRONT_END = "sglang.srt.entrypoints.engine"


def register() -> None:
    """Register the plugin: the entry point `sglang.srt.plugins`, which SGLang calls once in every process of a server.

    Raises:
        SystemExit: SGLang is too old, a variable is invalid, or this SGLang lacks what the plugin builds on.
    """
    if not settings.ENDPOINT.text():
        return
    try:
        _register()
    except Exception as error:
        raise SystemExit(f"resharder: {type(error).__name__}: {error}") from error


def _register() -> None:
    from resharder.client.errors import UsageError
    from resharder.client.inference import version_page
    from resharder.client.inference.settings import PluginSettings
    from sglang.version import __version__

    if problem := too_old(__version__):
        raise UsageError(problem)
    if (warning := untested(__version__)) and settings.WARNED_OF_SGLANG.text() != __version__:
        settings.WARNED_OF_SGLANG.set(__version__)
        logging.getLogger("sglang.resharder").warning(warning)
    settings.SERVER_ID.set_default(uuid.uuid4().hex)  # inherited by all processes of the server
    version_page.provide(PluginSettings.from_environment().server)
    # A process that SGLang starts has imported the module of what it runs; the first process imports the front end later.
    if _SCHEDULER in sys.modules:
        from resharder.client.inference.sglang.loader import watch_loading
        from resharder.client.inference.sglang.scheduler import watch_scheduler

        watch_loading()
        watch_scheduler()
    if _FRONT_END in sys.modules or not {_SCHEDULER, _DETOKENIZER} & sys.modules.keys():
        from resharder.client.inference.sglang.outputs import watch_outputs
        from resharder.client.inference.sglang.server import watch_server

        watch_outputs()
        watch_server()


def release_of(version: str) -> tuple[int, ...] | None:
    """Return (0, 5, 23) for `0.5.23.post1`; `None` for a build from a clone without tags."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)(?!\.?dev)", version)
    return tuple(map(int, found.groups())) if found else None


def too_old(version: str) -> str:
    """Return why the plugin does not support this SGLang version; empty if it does."""
    release = release_of(version)
    if release is None or release >= OLDEST:
        return ""
    return (
        f"SGLang {version} is not supported: this release of Resharder supports SGLang {_text(OLDEST)} and later, and is tested "
        f"with {', '.join(map(_text, TESTED))}. Install one of these"
    )


def untested(version: str) -> str:
    """Return the warning for an SGLang version without tests; empty for a tested one."""
    if release_of(version) in TESTED:
        return ""
    tested = ", ".join(map(_text, TESTED))
    return f"SGLang {version} is not tested with this release of Resharder, which is tested with {tested}"


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
