"""`resharder import`: names model and step before it begins; `latest` skips what it brings, unless it is told to serve it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from resharder.client.errors import UsageError
from resharder.client.operator import Operator
from resharder.client.tools.import_checkpoint import step_of

from tests.client.models import connected, publish_all, weights
from tests.support.command import answer, resharder
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.simulated_server import SimulatedServer
from tests.support.terminal import on_terminal


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon(keep_count=6) as running:
        (publisher,) = connected(running.endpoint, 1, "first")
        publish_all([publisher], 10, weights(1))[0].wait_ready(60)
        publisher.close()
        yield running


@pytest.fixture
def folder(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint named after its step."""
    monkeypatch.setenv("RESHARDER_ENDPOINT", daemon.endpoint)
    found = tmp_path / "step-0120"
    assert resharder("export", 1, found, "--model", "policy").code == 0
    return found


def test_latest_skips_an_imported_version_until_it_is_asked_for(daemon: Daemon, folder: Path) -> None:
    def versions() -> dict[int, bool]:
        return {version["number"]: version.get("skipped", False) for version in answer("versions")["versions"]}

    with SimulatedServer(daemon, "one"), Operator() as operator:
        wait_until(lambda: operator.server("one").version == 1, "it serves the first version")
        done = resharder("import", folder, "--take-over")
        begins = f"importing {folder} as a version of policy, step 120, skipped by `latest` unless it is the first\n"
        assert done.err == begins
        assert done.out.endswith("; `latest` skips it: `resharder update 2` serves it\n")
        assert versions() == {1: False, 2: True}
        assert "skipped by latest: `update 2` serves it" in resharder("versions").out
        wait_until(lambda: "version 2 is skipped" in operator.fleet("policy").reason, "the fleet says so")
        assert operator.server("one").version == 1
        daemon.kill()
        daemon.start()
        wait_until(lambda: [server.version for server in operator.servers()] == [1], "it is back")
        assert versions() == {1: False, 2: True}, "the mark is durable"
        assert operator.fleet("policy").wanted_version == 1
        assert resharder("update", 2, "--wait", "--timeout", 60).code == 0
        assert operator.server("one").version == 2
        assert resharder("update", "--wait", "--timeout", 60).code == 0
        assert operator.server("one").version == 1, "`latest` is the newest that is not skipped"
        assert resharder("import", folder, "--step", 7, "--serve").out.startswith("models/policy/versions/3 (step 7): ")
        wait_until(lambda: operator.server("one").version == 3, "it takes what is to be served")


def test_the_first_version_of_a_model_is_served(folder: Path) -> None:
    done = resharder("import", folder, "--model", "fresh")
    assert "`latest` skips it" not in done.out
    assert answer("versions", "--model", "fresh")["versions"][0]["skipped"] is False
    with Operator() as operator:
        assert operator.fleet("fresh").wanted_version == 1


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-0120", 120), ("checkpoint_7", 7), ("global_step300", 300), ("42", 42), ("Qwen3", None), ("Qwen3-8B", None)],
)
def test_the_step_is_the_number_at_the_end_of_the_folders_name(name: str, step: int | None, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert step_of(tmp_path / name) == step


def test_the_step_of_a_megatron_checkpoint_is_its_recorded_iteration(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("310\n")
    with pytest.raises(UsageError, match="it has no metadata"):
        step_of(tmp_path)
    newest = tmp_path / "iter_0000310"
    newest.mkdir()
    for name in ("metadata.json", ".metadata"):
        (newest / name).touch()
    assert step_of(tmp_path) == 310


def test_what_cannot_be_derived_is_asked_for_in_one_line(folder: Path, tmp_path: Path) -> None:
    nameless = shutil.copytree(folder, tmp_path / "final")
    for arguments, message in (
        ((nameless,), f"resharder: the name of {nameless} has no step, as step-100 has: pass --step N\n"),
        ((tmp_path / "none",), f"resharder: expected a folder with a checkpoint, got {tmp_path / 'none'}\n"),
    ):
        done = resharder("import", *arguments)
        assert (done.code, done.out, done.err) == (2, "", message)


def test_a_folder_without_a_config_is_refused_before_any_bar(folder: Path) -> None:
    (folder / "config.json").unlink()
    seen = on_terminal("import", folder, "--model", "policy")
    assert seen.code != 0
    assert "━" not in seen.text
    assert seen.lines[-1].startswith("resharder: ")
