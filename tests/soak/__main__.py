"""`python -m tests.soak`: `main`, whose processes all end with this one."""

import sys

from tests.support.supervised import supervised

if __name__ == "__main__":
    sys.exit(supervised([sys.executable, "-m", "tests.soak.main", *sys.argv[1:]]))
