"""Releases of megatron-core with which layouts are tested."""

from resharder.converters.allowances import VARIABLE, refuse
from resharder.converters.errors import UnsupportedModel

TESTED = ("0.16", "0.17", "0.18", "0.19")
"""Releases, without the last number. Others divide or arrange tensors in ways that no test has seen."""


def refuse_untested_release() -> None:
    """Raise UnsupportedModel for an untested release of megatron-core, unless the environment allows it."""
    from megatron.core import package_info

    found: str = package_info.__version__
    if ".".join(found.split(".")[:2]) not in TESTED:
        tested = f"{TESTED[0]} to {TESTED[-1]}"
        error = UnsupportedModel(
            f"megatron-core {found} is not tested: its tensors may be arranged in ways that Resharder reads wrongly, without an "
            f"error. Install megatron-core {tested}, or set {VARIABLE}=megatron-release and compare the log-probabilities of the "
            "trainer with those of a server"
        )
        refuse("megatron-release", error)
