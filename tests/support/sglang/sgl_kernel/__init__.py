"""Stand-in for sgl_kernel, which has no build for CPUs: SGLang imports names of it, and plain serving on a CPU calls none."""

from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in")

    return missing
