"""`tools.fuzz`, guided by coverage: atheris searches for bytes that reach new code.

python -m tools.fuzz_guided [FOLDER] [-runs=N] [-max_total_time=SECONDS]    # libFuzzer's options; FOLDER keeps a corpus

The bytes encode the choices that generate a request (tests/support/fuzzing.py), so most inputs are valid messages. One input is
one to four calls, in the state that earlier inputs left.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

_COMPILED = ["resharder.converters.storage.digest"]  # by numba, which needs the original bytecode
with atheris.instrument_imports(include=["resharder.server", "resharder.converters"], exclude=_COMPILED):
    import resharder.server.main  # noqa: F401

from tests.support.fuzz_daemon import World, fuzzed_daemon  # noqa: E402
from tests.support.fuzzing import Bytes  # noqa: E402

CALLS = 4
BATCH = 500  # inputs between checks of the state
_OPTIONS = ["-max_len=2048", "-len_control=0", "-timeout=300", "-rss_limit_mb=4096"]
_FOLDER = "RESHARDER_FUZZ_FOLDER"


class Fuzzer:
    def __init__(self, world: World) -> None:
        self._world, self._inputs = world, 0

    def __call__(self, data: bytes) -> None:
        random = Bytes(data)
        for _ in range(CALLS):
            self._world.call(random)
            if random.spent:
                break
        self._inputs += 1
        if self._inputs % BATCH == 0:
            self._world.check()
            self._world.work()


def run(folder: Path) -> None:
    """Fuzz with a corpus in `folder`. Does not return: libFuzzer ends the process."""
    with fuzzed_daemon(folder) as world:
        atheris.Setup([sys.argv[0], *_OPTIONS, f"-artifact_prefix={tempfile.gettempdir()}/", *sys.argv[1:]], Fuzzer(world))
        atheris.Fuzz()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="resharder-fuzz-", dir="/dev/shm") as folder:
        command = [sys.executable, "-m", "tools.fuzz_guided", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | {_FOLDER: folder}).returncode)


if __name__ == "__main__":
    run(Path(os.environ[_FOLDER])) if _FOLDER in os.environ else main()
