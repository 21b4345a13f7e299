"""The chart in deploy/helm as Helm renders it: its Go SDK, of the package helm-python-sdk, in a process of its own.

resources({"store": {"kind": "disk"}})     # raises Refused for values that the schema or a template refuses
"""

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "resharder"
RELEASE = NAMESPACE = "resharder"
_PROGRAM = """
import json, sys
import helm_python
what, path, values, name, namespace = sys.argv[1:]
try:
    if what == "lint":
        print(json.dumps(helm_python.lint(path, json.loads(values), strict=True)))
    else:
        print(json.dumps(helm_python.Chart.load(path).render(json.loads(values), name=name, namespace=namespace)))
except helm_python.HelmError as error:
    sys.exit(str(error))
"""


class Refused(Exception):
    """Helm refuses the values."""


@cache
def _helm(what: str, values: str, release: str = RELEASE) -> dict[str, Any]:
    if find_spec("helm_python") is None:
        pytest.skip("no Helm on this machine: make setup installs it where there is a wheel (PyPI: helm-python-sdk)")
    command = [sys.executable, "-c", _PROGRAM, what, str(CHART), values, release, NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 1 and "Traceback" not in done.stderr:
        raise Refused(done.stderr)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def resources(values: Mapping[str, Any], release: str = RELEASE) -> list[dict[str, Any]]:
    """Everything that the chart makes of these values."""
    manifests = _helm("render", json.dumps(values), release)
    found = [one for name, text in manifests.items() if name.endswith(".yaml") for one in yaml.safe_load_all(text)]
    return [one for one in found if one is not None]


def notes(values: Mapping[str, Any]) -> str:
    """What an installation prints."""
    found: str = _helm("render", json.dumps(values))["resharder/templates/NOTES.txt"]
    return found


def findings(values: Mapping[str, Any]) -> list[str]:
    """Errors and warnings of Helm's own linter."""
    report = _helm("lint", json.dumps(values))
    return [message["error"] for message in report["messages"] if message["severity"] > 1]
