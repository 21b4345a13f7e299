"""A vLLM plugin for tests: with RESHARDER_OTHER_HOST, workers are as on another host than the daemon's, that of one node.

They do not map the daemon's store, and read the nonce of the node whose folder the variable names, and no other one.
"""

import os
from pathlib import Path


def register() -> None:
    from resharder.client.inference.worker import host_node, source

    plain = host_node._read
    if "RESHARDER_OTHER_HOST" not in os.environ or plain.__name__ != "_read":
        return

    def read_here(paths):  # type: ignore[no-untyped-def]
        return plain([path for path in paths if Path(path).parent == Path(os.environ["RESHARDER_OTHER_HOST"])])

    source.shares_memory = lambda access: False
    host_node._read = read_here
