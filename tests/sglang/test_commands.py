"""Commands that start SGLang, in manifests, compose file and unit, parsed by SGLang."""

import shlex
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import helm

DEPLOY = Path(__file__).parents[2] / "deploy"


def of_kubernetes() -> list[str]:
    component = yaml.safe_load((DEPLOY / "kubernetes/components/sglang/kustomization.yaml").read_text())
    (patch,) = component["patches"]
    (command,) = (one["value"] for one in yaml.safe_load(patch["patch"]) if one["path"].endswith("/command"))
    found: list[str] = command
    return found


def of_compose(name: str) -> list[str]:
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"][name]
    assert 'exec python3 -m sglang.launch_server "$$@"' in service["entrypoint"][2]
    return ["python3", "-m", "sglang.launch_server", *service["command"]]


def of_helm() -> list[str]:
    fleet = {"name": "fast", "model": "policy", "engine": "sglang", "args": ["--tp-size=2"]}
    (found,) = (
        one
        for one in helm.resources({"fleets": [fleet]})
        if one["kind"] == "StatefulSet" and one["metadata"]["name"].endswith("fast")
    )
    command: list[str] = found["spec"]["template"]["spec"]["containers"][0]["command"]
    return command


def of_systemd() -> list[str]:
    unit = (DEPLOY / "systemd/resharder-sglang@.service").read_text()
    (line,) = (line.removeprefix("ExecStart=/opt/sglang/bin/") for line in unit.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.replace("$SGLANG_OPTIONS", "--port 8000"))


@pytest.mark.parametrize(
    "of",
    [
        of_kubernetes,
        pytest.param(of_helm, marks=pytest.mark.process),
        lambda: of_compose("sglang"),
        lambda: of_compose("node-sglang"),
        of_systemd,
    ],
    ids=["kubernetes", "helm", "compose", "compose-node", "systemd"],
)
def test_sglang_knows_every_option(of: Callable[[], list[str]]) -> None:
    from sglang.srt.server_args import ServerArgs

    _, *module = of()[:3]
    assert module == ["-m", "sglang.launch_server"]
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(of()[3:])
    assert parsed.model_path.endswith("/config")
    assert parsed.port == 8000
    assert parsed.load_format == "auto"
