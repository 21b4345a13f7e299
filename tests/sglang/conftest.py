"""Tests of the SGLang plugin: `make test-sglang`, in a venv of its own. Elsewhere, those that need SGLang are left out."""

import os
import sys
from importlib.util import find_spec

from tests.support.sglang_server import CPU_ENVIRONMENT, STAND_INS

_NEED_SGLANG = [
    f"test_{name}.py"
    for name in ("commands", "embedded", "faults", "fleet", "fp8", "ranks", "replicas", "routes", "scheduler", "slime", "verl")
]
collect_ignore_glob = [] if find_spec("sglang") else _NEED_SGLANG
if find_spec("sglang"):
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", CPU_ENVIRONMENT["SGLANG_USE_CPU_ENGINE"])
    sys.path.insert(0, str(STAND_INS))
