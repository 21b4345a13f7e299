"""Imports of the process from which those of a cycle are forked. It has called nothing and runs no thread."""

import gc

import tests.failpoints.light_server  # noqa: F401

gc.collect()
gc.freeze()  # else each child collects all of vLLM's objects again
