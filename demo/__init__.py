"""Demonstration of the whole path from a trainer to vLLM: `make demo`."""
