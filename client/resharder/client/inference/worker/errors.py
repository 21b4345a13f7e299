"""The error that ends a staging, an install or a boot, and the refusal of another config that raises it."""

from collections.abc import Sequence

from resharder.converters.allowances import refuse
from resharder.converters.hf_config import Difference, described

_REFUSAL = "server-config"


class InstallError(Exception):
    """A version cannot be staged or installed. The message names the affected tensors."""


def refuse_config(version: str, found: Sequence[Difference], booting: bool = False) -> None:
    """Raise `InstallError` if the engine computes with another config.json than a version's.

    Args:
        version: Full name of the version.
        found: The values that differ, with the engine's first.
        booting: Whether the server starts, so that it is no use to start it again as it is.
    """
    if not found:
        return
    todo = "start it on" if booting else "restart the server with"
    error = InstallError(
        f"{version} has another config.json than this server was started with: {described(found)}; "
        f"{todo} the version's config (`resharder fetch-config`), or allow the difference with RESHARDER_ALLOW={_REFUSAL}"
    )
    refuse(_REFUSAL, error)
