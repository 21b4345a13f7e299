"""The units, by systemd's own tools, in a root of their own in which the programs that they start exist."""

import configparser
import re
import shutil
from pathlib import Path

import pytest

from tests.support.tools import checked, tool

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
SYSTEM = Path("/usr/lib/systemd/system")
PROGRAMS = (
    "opt/resharder/bin/resharderd",
    "opt/resharder/bin/resharder-node",
    *(f"opt/vllm/bin/{name}" for name in ("resharder", "vllm")),
    *(f"opt/sglang/bin/{name}" for name in ("resharder", "python")),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    if not (SYSTEM / "sysinit.target").exists():
        pytest.skip(f"no units of systemd itself in {SYSTEM}: .ci/tools installs them (systemd)")
    there = tmp_path / SYSTEM.relative_to("/")
    there.mkdir(parents=True)
    for kind in ("target", "slice", "socket", "mount"):
        for unit in SYSTEM.glob(f"*.{kind}"):
            shutil.copy(unit, there, follow_symlinks=False)
    shutil.copytree(UNITS, tmp_path / "etc" / "systemd" / "system")
    for program in PROGRAMS:
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", path)
    return tmp_path


def test_the_units_are_what_systemd_takes(root: Path) -> None:
    analyze = tool("systemd-analyze", "systemd")
    units = ("resharderd.service", "resharder-node.service", "resharder-vllm@left.service", "resharder-sglang@left.service")
    output = checked(analyze, "verify", "--man=no", f"--root={root}", *units)
    assert output == "", "an option that systemd does not know is a warning only"


@pytest.mark.parametrize(
    ("unit", "exposure"),
    [
        ("resharderd.service", 1.5),
        ("resharder-node.service", 1.5),
        ("resharder-vllm@left.service", 4.0),
        ("resharder-sglang@left.service", 4.0),
    ],
)
def test_the_units_are_closed(root: Path, unit: str, exposure: float) -> None:
    analyze = tool("systemd-analyze", "systemd")
    checked(analyze, "security", "--offline=true", f"--threshold={int(10 * exposure)}", f"--root={root}", "--no-pager", unit)


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.iterdir()))
def test_a_unit_is_started_again_however_often_it_has_ended(unit: str) -> None:
    found = configparser.RawConfigParser(strict=False, comment_prefixes=("#",), delimiters=("=",))
    found.read_string((UNITS / unit).read_text())
    assert found["Service"]["Restart"] == "always"
    assert found["Unit"]["StartLimitIntervalSec"] == "0", "systemd gives up after five starts within ten seconds"


def test_there_is_time_to_drain() -> None:
    from resharder.server.config import Config

    lines = dict(line.split("=", 1) for line in (UNITS / "resharderd.service").read_text().splitlines() if "=" in line[:24])
    assert int(lines["TimeoutStopSec"]) >= Config().drain_seconds + 15


def test_a_node_has_time_to_wait_for_copies_of_what_it_alone_holds() -> None:
    from resharder.server.node.main import NodeConfig

    deploy, least = UNITS.parent, NodeConfig().drain_seconds + 15
    bounds = {
        "systemd/resharder-node.service": r"^TimeoutStopSec=(\d+)$",
        "compose/compose.yaml": r"resharder-node[\s\S]*?stop_grace_period: (\d+)s",
        "kubernetes/components/nodes/node.yaml": r"terminationGracePeriodSeconds: (\d+)",
    }
    for file, bound in bounds.items():
        found = re.search(bound, (deploy / file).read_text(), re.MULTILINE)
        assert found is not None, file
        assert int(found[1]) >= least, file


def test_what_is_commented_out_seals_the_registry_and_takes_it_from_nodes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from resharder.server.config import load

    unit = root / "etc" / "systemd" / "system" / "resharderd.service"
    lines = re.findall(r"^#(\w+=.*)$", unit.read_text(), re.MULTILINE)
    unit.write_text(re.sub(r"^#(\w+=.*)$", r"\1", unit.read_text(), flags=re.MULTILINE))
    assert checked(tool("systemd-analyze", "systemd"), "verify", "--man=no", f"--root={root}", unit.name) == ""
    credential, *environment = lines
    for line in environment:
        name, value = line.removeprefix("Environment=").split("=")
        monkeypatch.setenv(name, value.replace("%d", "/run/credentials/resharderd.service"))
    config = load(None, {})
    assert config.from_nodes
    assert credential == f"LoadCredential={config.registry_key.name}:/etc/resharder/registry.key"  # type: ignore[union-attr]
