"""`resharderd`, the daemon (`python -m resharder.server`), and `resharder-node`. Both name the extra that they lack."""

import sys
from importlib import import_module

from resharder.converters.extras import explain


def main() -> None:
    """Run the daemon. Exits 2 with one line if a package of an extra is missing."""
    _run("resharderd", "resharder.server.main")


def node() -> None:
    """Run a node. Exits 2 with one line if a package of an extra is missing."""
    _run("resharder-node", "resharder.server.node.main")


def _run(command: str, module: str) -> None:
    try:
        import_module(module).main()
    except ModuleNotFoundError as error:
        if (line := explain(error, "server")) is None:
            raise
        print(f"{command}: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
