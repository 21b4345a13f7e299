"""`resharderd`, the daemon: `python -m resharder.server`. Without its extra, it prints which one to install."""

import sys

from resharder.converters.extras import explain


def main() -> None:
    """Run the daemon. Exits 2 with one line if a package of an extra is missing."""
    try:
        from resharder.server.main import main as run

        run()
    except ModuleNotFoundError as error:
        if (line := explain(error, "server")) is None:
            raise
        print(f"resharderd: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
