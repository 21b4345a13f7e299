"""A vLLM plugin for tests: with RESHARDER_OTHER_HOST, workers are as on another host than the daemon's, that of one node.

They do not map the daemon's store, and read the nonce of the node whose folder the variable names, and no other one.
"""

import os
from pathlib import Path


def register() -> None:
    from resharder.client.inference.worker import host_node, source
    from resharder.client.transport.shared_memory import read_nonces

    if "RESHARDER_OTHER_HOST" not in os.environ or host_node._read is not read_nonces:
        return  # not wanted, or done already: vLLM loads plugins more than once

    def read_here(paths):  # type: ignore[no-untyped-def]
        return read_nonces(path for path in paths if Path(path).parent == Path(os.environ["RESHARDER_OTHER_HOST"]))

    source.shares_memory = lambda access: False
    host_node._read = read_here
