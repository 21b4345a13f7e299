"""What the processes of a cycle are forked from: everything is imported, nothing has been called, no thread runs."""

import gc

import tests.failpoints.light_server  # noqa: F401

gc.collect()
gc.freeze()  # else each child collects all of vLLM's objects again
