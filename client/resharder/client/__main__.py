"""`resharder`, the operator's command: `python -m resharder.client`. Without its extra, it prints which one to install."""

import sys

from resharder.converters.extras import explain


def main() -> None:
    """Run the command. Exits 2 with one line if a package of an extra is missing."""
    try:
        from resharder.client import cli

        cli.main()
    except ModuleNotFoundError as error:
        if (line := explain(error, "client")) is None:
            raise
        print(f"resharder: {line}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
