"""`python -m tools.mutants`: `main`, whose processes all end with this one."""

import sys

from tests.support.supervised import supervised

if __name__ == "__main__":
    sys.exit(supervised([sys.executable, "-m", "tools.mutants.main", *sys.argv[1:]]))
