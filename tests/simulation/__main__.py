"""`python -m tests.simulation`: `main`, whose processes all end with this one. The order of sets is part of a schedule."""

import sys

from tests.support.supervised import supervised

if __name__ == "__main__":
    sys.exit(supervised([sys.executable, "-m", "tests.simulation.main", *sys.argv[1:]], {"PYTHONHASHSEED": "0"}))
