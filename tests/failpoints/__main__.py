"""The matrix of failpoints: `python -m tests.failpoints [--only NAME] [--kind KIND] [--jobs N] [--sample N --seed SEED]`.

Runs one cycle for each failpoint and kind, and fails if one does not come to peace or does not reach its failpoint. With
`--seconds`, no cycle begins later; the last line states with which `--skip` the rest is run. All processes of the run end with
this one.
"""

import sys

from tests.support.supervised import supervised

if __name__ == "__main__":
    sys.exit(supervised([sys.executable, "-m", "tests.failpoints.matrix", *sys.argv[1:]]))
