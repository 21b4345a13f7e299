"""The staged path on one host: `python -m benchmarks.staged_path [--rounds N] [--json FILE]`, or `make bench JSON=FILE`."""

import argparse
from pathlib import Path

from benchmarks import install, publish
from benchmarks.rows import show, write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [*publish.measure(arguments.rounds), *install.measure(arguments.rounds)]
    show(rows)
    if arguments.json:
        write(rows, arguments.json)


if __name__ == "__main__":
    main()
