"""Demonstration of the whole path from a trainer to a server of vLLM or SGLang: `make demo`."""
