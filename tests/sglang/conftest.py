"""Tests of the SGLang plugin: `make test-sglang`, in a venv of its own. Elsewhere, those that need SGLang are left out."""

from importlib.util import find_spec

collect_ignore_glob = (
    [] if find_spec("sglang") else ["test_faults.py", "test_fleet.py", "test_ranks.py", "test_routes.py", "test_server.py"]
)
