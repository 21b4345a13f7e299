"""The command line: what needs no server."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from resharder.client.tools import doctor
from resharder.server.config import Config
from resharder.server.store.retention import Retention
from resharder.server.store.store import Store

from tests.client.models import CONFIG, connected, equal, publish_all, weights
from tests.support.command import answer, resharder
from tests.support.daemon import Daemon
from tests.support.observing import wait_until


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        publishers = connected(running.endpoint, 2, "cli")
        publish_all(publishers, 10, weights(1))[0].wait_ready(60)
        yield running
        for publisher in publishers:
            publisher.close()


def test_versions_status_and_servers_print_tables_and_json(daemon: Daemon) -> None:
    at = ("--endpoint", daemon.endpoint)
    (version,) = answer("versions", *at)["versions"]
    assert (version["number"], version["state"], version["step"]) == (1, "READY", 10)
    assert answer("servers", *at) == {"servers": []}
    assert answer("status", *at)["daemon"]["models"] == ["policy"]
    assert "READY" in resharder("versions", *at).out
    assert "models/policy/publishers/1" in resharder("status", *at).out
    assert resharder("servers", *at).out == "no servers\n"


def test_export_writes_a_checkpoint_or_refuses_a_folder_in_use(daemon: Daemon, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "out"
    done = resharder("export", "1", folder, "--endpoint", daemon.endpoint)
    assert done.code == 0, done.err
    assert equal({n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}, weights(1))
    version = daemon.store / "models/policy/versions/00000001"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {p.name: p.read_bytes() for p in version.iterdir()}
    assert done.err == "", "there is no bar without a terminal"
    exported = answer("export", "latest", tmp_path / "json", "--endpoint", daemon.endpoint)
    assert exported == {
        "version": "models/policy/versions/1",
        "folder": str(tmp_path / "json"),
        "files": len([*folder.iterdir()]),
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
    }
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = resharder("export", "1", folder, "--endpoint", daemon.endpoint)
    assert (again.code, again.out) == (2, "")
    assert "not empty" in again.err
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_fetch_config_writes_what_vllm_serve_needs(daemon: Daemon, tmp_path: Path) -> None:
    assert answer("fetch-config", tmp_path / "config", "--endpoint", daemon.endpoint)["files"] == ["config.json"]
    assert json.loads((tmp_path / "config" / "config.json").read_text()) == CONFIG
    assert answer("fetch-config", tmp_path / "config", "--endpoint", daemon.endpoint)["files"] == ["config.json"]
    (tmp_path / "config" / "config.json").write_text("{}")
    assert "not empty" in resharder("fetch-config", tmp_path / "config", "--endpoint", daemon.endpoint).err


def test_doctor_finds_the_daemon_and_its_memory(daemon: Daemon) -> None:
    def found() -> dict[str, dict[str, str]]:
        return {check["name"]: check for check in answer("doctor", "--endpoint", daemon.endpoint)["checks"]}

    def clocks_agree() -> bool:
        """A machine that stops one of the two between question and answer moves them apart."""
        return abs(float(found()["clocks"]["found"].split()[-2])) < 1

    wait_until(clocks_agree, "clocks that agree")
    checks = found()
    assert checks["memory shared with the daemon"]["found"].startswith("yes")
    parts = {"shared memory", "shared memory speed", "huge pages in shared memory", "open files", "locked memory"}
    assert {*parts, "python", "grpcio", "torch", "daemon"} <= checks.keys()
    assert checks["daemon"]["verdict"] == "ok"


def test_doctor_fails_where_something_must_be_mended() -> None:
    done = resharder("doctor", "--endpoint", "127.0.0.1:1")
    assert done.code == 1
    assert "start resharderd" in done.out


def test_the_advice_on_room_is_the_daemons_own_rule(tmp_path: Path) -> None:
    reserved = Retention(Config.model_fields["keep_count"].default).sets(1 << 30)
    assert reserved == doctor.RESERVED_VERSIONS
    store, there = Store(tmp_path / "store", shared=False), shutil.disk_usage(tmp_path).free
    store.close()
    assert store.capacity.limit_bytes / there == pytest.approx(doctor.STORE_SHARE, rel=0.02)
    page = " ".join((Path(__file__).parents[2] / "docs/operator.md").read_text().split())
    assert f"| `keep_count` 3 (default) | {reserved} S | {reserved / doctor.STORE_SHARE:g} S |" in page


@pytest.mark.parametrize("total", [64 << 20, 32 << 30])
def test_too_little_shared_memory_is_said_with_how_much_it_takes(
    total: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=total, free=total // 20))
    check = doctor.shared_memory_room(tmp_path)
    assert check.verdict == ("fail" if total == 64 << 20 else "warn")
    assert "reserves 4 times its model, in 80% of the space: give it 5 times the model" in check.hint


@pytest.mark.parametrize(
    ("options", "policy", "verdict", "hint"),
    [
        ("rw,size=9k", "always within_size advise [never] deny force", "warn", "mount -o remount,huge=always /mnt/store: "),
        ("rw,huge=never", "always [advise] never deny force", "warn", "2.7 to 9.2 GiB/s"),
        ("rw,huge=advise", "always within_size advise [never] deny force", "warn", "mount -o remount,huge=always"),
        ("rw,huge=always", "always within_size advise [never] deny force", "ok", ""),
        ("rw,huge=within_size", "[always] within_size advise never deny force", "ok", ""),
        ("rw,huge=always", "always within_size advise never [deny] force", "warn", "echo never > /sys/kernel/mm/"),
        ("rw", "always within_size advise never deny [force]", "ok", ""),
        ("rw", "", "ok", ""),
    ],
)
def test_a_store_in_memory_without_huge_pages_is_told_what_they_bring(options: str, policy: str, verdict: str, hint: str) -> None:
    mounts = f"/dev/vda / ext4 rw 0 0\nother /mnt/store tmpfs rw,huge=always 0 0\nnone /mnt/store tmpfs {options} 0 0\n"
    check = doctor.huge_pages(Path("/mnt/store/models"), mounts, policy)
    assert check.verdict == verdict
    assert hint in check.hint
    assert doctor.huge_pages(Path("/mnt"), mounts, policy).found == "/mnt is ext4, which has no huge pages"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("versions", "--endpoint", "127.0.0.1:1"), 3, "127.0.0.1:1"),
        (("versions", "--endpoint", "nonsense"), 2, "host:port"),
        (("export", "99", "OUT", "--endpoint", "DAEMON"), 4, "99"),
        (("export", "first", "OUT", "--endpoint", "DAEMON"), 2, "latest"),
        (("export", "1", "no/such/folder", "--endpoint", "DAEMON"), 2, "does not exist"),
        (("fetch-config", "nobody", "OUT", "--endpoint", "DAEMON"), 4, "nobody"),
    ],
)
def test_a_users_mistake_is_one_line_and_an_exit_code(
    daemon: Daemon, tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    places = {"DAEMON": daemon.endpoint, "OUT": str(tmp_path / "out")}
    done = resharder(*(places.get(argument, argument) for argument in arguments))
    assert done.code == code
    assert message in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


def test_it_runs_as_a_process_and_the_page_has_every_command_and_exit_code_of_its_help() -> None:
    done = subprocess.run([sys.executable, "-m", "resharder.client.cli", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    codes = re.findall(r"^ +(\d+)  +\S", done.stdout.split("Exit codes:")[1], re.MULTILINE)
    assert codes == re.findall(r"^\| (\d+) \|", page, re.MULTILINE) != []
    names = {name for name in re.findall(r"^  ([a-z][a-z-]+) {2}", done.stdout, re.MULTILINE)} | {"fleet set", "fleet show"}
    assert {name for name in names - {"fleet"} if f"`resharder {name}" not in page} == set()
    assert {"status", "update", "drain", "gc", "check"} <= names


def test_examples_in_a_help_keep_their_lines() -> None:
    shown = [line.strip() for line in resharder("fleet", "set", "--help").out.splitlines()]
    assert "resharder fleet set --rolling 2 --max-failures 1" in shown
    shown = [line.strip() for line in resharder("import", "--help").out.splitlines()]
    assert "resharder import runs/7/checkpoints --config Qwen3-8B" in shown


def test_the_command_starts_without_torch_or_vllm() -> None:
    code = "import sys, resharder.client.cli; print([m for m in ('torch', 'vllm', 'numba', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
