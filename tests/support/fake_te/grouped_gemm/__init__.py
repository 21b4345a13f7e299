"""A stand-in for grouped_gemm on a CPU: what megatron-core 0.16.1's legacy GroupedMLP uses of it."""

from . import ops  # noqa: F401
