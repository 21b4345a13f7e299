"""The extras of the distribution, and one line for a package that is not installed."""

from collections.abc import Iterator
from contextlib import contextmanager

_PACKAGES = {
    "client": "numba rich typer xxhash",
    "server": (
        "blake3 grpc_health grpc_reflection numba prometheus_client pydantic pydantic_settings starlette structlog typer "
        "uvicorn xxhash yaml zstandard"
    ),
    "archive": "obstore",
    "otel": "opentelemetry",
    "import": "safetensors",
    "megatron": "megatron",
}
_TORCH = "install the build for this host's devices; for CPUs: pip install torch --index-url https://download.pytorch.org/whl/cpu"
_VLLM = "install vLLM beside it, as docs/vllm.md describes"


def explain(error: ModuleNotFoundError, role: str) -> str | None:
    """Return one line that names the extra which brings a missing package; None for a module of no extra.

    Args:
        error: The failed import.
        role: The extra of the program, `client` or `server`; it is named where several extras bring the package.
    """
    package = (error.name or "").partition(".")[0]
    extras = [extra for extra, packages in _PACKAGES.items() if package in packages.split()]
    if package == "torch":
        return f"the package torch is not installed: {_TORCH}"
    if package == "vllm":
        return f"the package vllm is not installed: {_VLLM}"
    if not extras:
        return None
    extra = role if role in extras else extras[0]
    return f"the package {package} is not installed: {install_line(extra)}"


def install_line(extra: str) -> str:
    """Return what brings an extra. No release is on PyPI, where another distribution may take the name."""
    return f"pip install '.[{extra}]' in a checkout of Resharder (docs/install.md)"


@contextmanager
def explained(role: str) -> Iterator[None]:
    """Let a failed import of the block name the extra that brings the package, as `explain`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (line := explain(error, role)) is None:
            raise
        raise ModuleNotFoundError(line, name=error.name) from None
