"""Commands that start vLLM, in manifests, compose file and unit, parsed by vLLM: a renamed option would end a server's start."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support import helm
from tests.support.vllm_places import cli_args

pytest.importorskip("vllm", reason="its parser is needed")

DEPLOY = Path(__file__).parents[2] / "deploy"


def of_kubernetes() -> list[str]:
    resources = yaml.safe_load_all((DEPLOY / "kubernetes/base/fleet.yaml").read_text())
    (fleet,) = (one for one in resources if one["kind"] == "StatefulSet")
    command: list[str] = fleet["spec"]["template"]["spec"]["containers"][0]["command"]
    return command


def of_compose(name: str) -> list[str]:
    service = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["services"][name]
    assert 'exec vllm serve /model/config "$$@"' in service["entrypoint"][2]
    return ["vllm", "serve", "/model/config", *service["command"]]


def of_helm() -> list[str]:
    (fleet,) = (one for one in helm.resources({}) if one["kind"] == "StatefulSet" and one["metadata"]["name"].endswith("policy"))
    command: list[str] = fleet["spec"]["template"]["spec"]["containers"][0]["command"]
    return command


def of_systemd() -> list[str]:
    unit = (DEPLOY / "systemd/resharder-vllm@.service").read_text()
    (line,) = (line.removeprefix("ExecStart=/opt/vllm/bin/") for line in unit.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.replace("$VLLM_OPTIONS", "--port 8000"))


@pytest.mark.parametrize(
    "of",
    [
        of_kubernetes,
        pytest.param(of_helm, marks=pytest.mark.process),
        lambda: of_compose("vllm"),
        lambda: of_compose("node-vllm"),
        of_systemd,
    ],
    ids=["kubernetes", "helm", "compose", "compose-node", "systemd"],
)
def test_vllm_knows_every_option(of: Callable[[], list[str]]) -> None:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = of()
    assert command[:2] == ["vllm", "serve"]
    parsed = cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(command[2:])
    cli_args().validate_parsed_serve_args(parsed)
    assert parsed.load_format == "resharder"
    assert parsed.model_tag.endswith("/config")
    assert parsed.port == 8000
    assert parsed.shutdown_timeout == 120
