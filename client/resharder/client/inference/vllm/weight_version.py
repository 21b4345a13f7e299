"""vLLM's own weight version, derived from the server's page; read against 0.32.

vLLM's engine core has one weight version, `default` at first (`_weight_version`, `v1/engine/core.py`). It
stamps the outputs of every step with it, from which token-in-token-out answers get their spans
(`weight_versions`), and returns it for `/weight_info`. The workers write what they have installed to the
page (`version_page.py`), only while the engine is paused, so the page's version at the end of a step is
that of the step's tokens. Boots, installs, rollbacks and dropped weights need no call of their own, and
engine cores and API servers cannot disagree.
"""

import functools
import logging
from typing import Any

from resharder.client.inference.control.labels import name
from resharder.client.inference.version_page import page

logger = logging.getLogger("vllm.resharder.weight_version")

_STAMP = "_attach_weight_version"
_WARNED = "_resharder_page_unreadable"


def watch_weight_version() -> None:
    """Make the engine core's weight version that of `X-Resharder-Version`."""
    from vllm.v1.engine.core import EngineCore

    follow_page(EngineCore)


def follow_page(core: Any) -> None:
    """Make a class of engine cores take its weight version from the page.

    A no-op for a vLLM that does not stamp outputs (before 0.32).
    """
    if not hasattr(core, _STAMP) or hasattr(core.get_weight_version, "resharder"):
        return
    _precede(core, _STAMP)
    _precede(core, "get_weight_version")


def _precede(core: Any, method: str) -> None:
    plain = getattr(core, method)

    @functools.wraps(plain)
    def preceded(self: Any, *args: Any) -> Any:
        self.set_weight_version(_installed(self))
        return plain(self, *args)

    preceded.resharder = True  # type: ignore[attr-defined]
    setattr(core, method, preceded)


def _installed(core: Any) -> str:
    """Return the label of the installed version; `none` if the page cannot be read."""
    try:
        return name((page().version,))
    except OSError as error:
        if not hasattr(core, _WARNED):
            setattr(core, _WARNED, True)
            logger.warning("cannot read the server's versions: %s", error)
        return name((0,))
