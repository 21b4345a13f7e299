"""Without an extra, each program ends with one line that names it; with the extra, it starts."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import typer
from packaging.metadata import Metadata
from resharder.client.cli import app
from resharder.converters.extras import install_line

from tests.support.bare_venv import ROOT, BareVenv
from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config
from tests.support.variants import sampled


def commands(of: typer.Typer = app) -> Iterator[list[str]]:
    """Every command of `resharder`, as its words."""
    group = typer.main.get_command(of)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        yield from ([name, each] for each in inner) if inner else [[name]]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> BareVenv:
    return BareVenv(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> BareVenv:
    return BareVenv(tmp_path_factory.mktemp("client"), "client")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> BareVenv:
    return BareVenv(tmp_path_factory.mktemp("server"), "server")


def test_each_program_names_the_extra_that_it_lacks(bare: BareVenv) -> None:
    for program, extra in (("client", "client"), ("server", "server")):
        ended = bare.run("-m", f"resharder.{program}", "--help")
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1
        assert f"pip install '.[{extra}]'" in ended.stderr


@pytest.mark.parametrize("name", sampled(["connect", "fill", "import_checkpoint", "attach"], ["connect", "attach"]))
def test_an_import_without_its_extra_names_the_package_and_how_to_get_it(bare: BareVenv, name: str) -> None:
    assert bare.run("-c", "from resharder.client import Tls, UsageError").stderr == ""
    last = bare.run("-c", f"from resharder.client import {name}").stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: the package")
    assert "pip install" in last


def test_an_operator_needs_no_extra_until_it_exports(bare: BareVenv) -> None:
    assert bare.run("-c", "from resharder.client import Operator").stderr == ""
    last = bare.run("-c", "from resharder.client import Operator; Operator.export(None, 1, None)").stderr.splitlines()[-1]
    assert last == f"ModuleNotFoundError: the package xxhash is not installed: {install_line('client')}"


EVERY_HELP = """
import json, sys
from resharder.client import cli
for words in json.loads(sys.argv[1]):
    try:
        cli.main([*words, "--help"])
    except SystemExit as end:
        assert not end.code, words
"""


def test_with_the_extra_client_every_command_has_its_help(client: BareVenv) -> None:
    ended = client.run("-c", EVERY_HELP, json.dumps(list(commands())))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("Usage: ") == len(list(commands()))


def test_commands_that_need_megatron_say_how_to_get_it(client: BareVenv, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    for name in ("metadata.json", ".metadata"):
        (tmp_path / name).touch()
    for command in (["import", str(tmp_path), "--model", "m", "--step", "1"], ["check", str(tmp_path), "--world", "2"]):
        ended = client.run("-m", "resharder.client", *command)
        assert ended.returncode == 2, ended.stderr
        assert "Traceback" not in ended.stderr
        assert "pip install '.[megatron]'" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("shared_memory", sampled([True, False], [True]))
def test_a_safetensors_folder_is_imported_and_exported_without_torch(
    client: BareVenv, tmp_path: Path, shared_memory: bool
) -> None:
    assert "No module named 'torch'" in client.run("-c", "import torch").stderr
    folder = save_checkpoint(tmp_path / "step-1", tiny_config("qwen3"), dtype=torch.bfloat16)
    with Daemon(shared_memory=shared_memory) as daemon:
        ended = client.run("-m", "resharder.client", "import", str(folder), "--model", "policy", "--endpoint", daemon.endpoint)
        assert (ended.returncode, "policy/versions/1" in ended.stdout) == (0, True), ended.stderr
        copied = client.run("-m", "resharder.client", "export", "1", str(tmp_path / "copy"), "--endpoint", daemon.endpoint)
        assert copied.returncode == 0, copied.stderr
    imported, exported = load_checkpoint(folder), load_checkpoint(tmp_path / "copy")
    assert imported.keys() == exported.keys()
    assert all(imported[name].equal(exported[name]) for name in imported)


def test_a_daemon_that_is_not_there_is_one_line(client: BareVenv) -> None:
    ended = client.run("-m", "resharder.client", "status")
    assert ended.returncode == 3
    assert ended.stderr.count("\n") == 1
    assert len(ended.stderr) < 160


def test_with_the_extra_server_the_daemon_starts(server: BareVenv, tmp_path: Path) -> None:
    assert server.run("-m", "resharder.server", "--version").stdout.startswith("resharderd ")
    assert server.run("-m", "resharder.server.node.main", "--version").stdout.startswith("resharder-node ")
    (tmp_path / "file").touch()
    ended = server.run("-m", "resharder.server", "--store", str(tmp_path / "file"))
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert "file is a file, not a folder" in ended.stderr


def test_a_wheel_has_the_packages_their_types_and_both_programs_but_no_tests(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    assert subprocess.run(build, timeout=300, check=False).returncode == 0
    (wheel,) = tmp_path.glob("resharder-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (Metadata.from_email(archive.read(name)) for name in names if name.endswith("/METADATA"))
        (programs,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
    for package in ("client", "server", "converters"):
        assert f"resharder/{package}/py.typed" in names
    top = {name.partition("/")[0] for name in names}
    assert top == {"resharder", *(name for name in top if name.startswith("resharder-"))}
    assert [name for name in names if "test" in name and "/share/resharder/" not in name] == []  # rules_test.yaml goes with rules
    assert (metadata.name, str(metadata.version), metadata.license_expression) == (
        "resharder",
        version("resharder"),
        "Apache-2.0",
    )
    assert (metadata.author, metadata.license_files) == ("The Resharder maintainers", ["LICENSE"])
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert (metadata.description or "", metadata.description_content_type) == ((ROOT / "README.md").read_text(), "text/markdown")
    assert metadata.summary
    assert metadata.keywords
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(metadata.classifiers or ())
    assert str(metadata.requires_python) == ">=3.11"
    assert metadata.provides_extra == ["archive", "client", "kubernetes", "megatron", "nixl", "otel", "server", "sglang", "vllm"]
    assert {line.split(" = ")[0] for line in programs.splitlines()} >= {"resharder", "resharderd", "resharder-node"}
