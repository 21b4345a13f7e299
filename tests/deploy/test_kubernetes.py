"""Manifests that kustomize makes of each overlay, and Helm of the chart: Kubernetes' own schemas, and what no schema says."""

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from resharder.client.cli import app
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.sglang.refusals import refuse_settings
from resharder.client.inference.sglang.routes import ROUTES as SGLANG_ROUTES
from resharder.server.config import Config, load
from resharder.server.node.main import NodeConfig

from tests.support import helm
from tests.support.tools import checked, tool
from tests.support.variants import sampled

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
VERSIONS = ("1.29", "1.32", "1.34")
CHARTS = ("chart-memory", "chart-disk", "chart-host")
SGLANG = ("component-sglang", "chart-sglang")
NOT_KUBERNETES = {"cert-manager.io/v1", "monitoring.coreos.com/v1"}  # their schemas are with cert-manager and the operator
UNITS = {"": 1, "Mi": 1 << 20, "Gi": 1 << 30}
Resource = dict[str, Any]


@cache
def built(overlay: str) -> list[Resource]:
    """Return the resources of an overlay, or of the chart with one kind of store and every option enabled."""
    if overlay == "component-sglang":
        with TemporaryDirectory() as folder:
            return extended(Path(folder), "sglang")
    if overlay == "chart-sglang":
        return helm.resources({"fleetDefaults": {"engine": "sglang"}})
    if overlay in CHARTS:
        trainer = {"enabled": True, "image": "registry.example/trainer:1", "command": ["python", "train.py"]}
        store, daemon = {"kind": overlay.removeprefix("chart-")}, {"nodeSelector": {"resharder-store": "here"}}
        return helm.resources({"store": store, "daemon": daemon, "serviceMonitor": {"enabled": True}, "trainer": trainer})
    kubectl = tool("kubectl", "the Kubernetes project's own package")
    return [*yaml.safe_load_all(checked(kubectl, "kustomize", KUBERNETES / "overlays" / overlay))]


def extended(folder: Path, component: str) -> list[Resource]:
    """Return the resources of an overlay of one's own, in `folder`: that of the disk store with a component."""
    here = Path(os.path.relpath(KUBERNETES, folder.resolve()))
    own = {"namespace": "resharder", "resources": [f"{here}/overlays/disk"], "components": [f"{here}/components/{component}"]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return [*yaml.safe_load_all(checked(tool("kubectl", "the Kubernetes project's own package"), "kustomize", folder))]


@pytest.fixture(params=[*OVERLAYS, *CHARTS, *SGLANG])
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    return built(request.param)


def of(resources: list[Resource], kind: str, name: str = "") -> list[Resource]:
    return [one for one in resources if one["kind"] == kind and name in ("", one["metadata"]["name"])]


def pods(resources: list[Resource]) -> dict[str, Resource]:
    """Return the pod templates by the name of their application."""
    found = (one["spec"]["template"] for one in of(resources, "StatefulSet"))
    return {pod["metadata"]["labels"]["app.kubernetes.io/name"]: pod for pod in found}


def containers(pod: Resource) -> Iterator[Resource]:
    yield from pod["spec"].get("initContainers", [])
    yield from pod["spec"]["containers"]


def size(quantity: str) -> int:
    number = quantity.rstrip("GMi")
    return int(number) * UNITS[quantity.removeprefix(number)]


def environment(resources: list[Resource], container: Resource) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        (config,) = of(resources, "ConfigMap", source["configMapRef"]["name"])
        found |= config["data"]
    return found | {one["name"]: one.get("value", "fleet-0") for one in container.get("env", [])}


def daemon_configuration(resources: list[Resource], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """As the daemon itself reads it."""
    pod = pods(resources)["resharderd"]
    (name,) = (volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if volume["name"] == "config")
    (config,) = of(resources, "ConfigMap", name)
    file = folder / "resharderd.yaml"
    file.write_text(config["data"]["resharderd.yaml"])
    (container,) = containers(pod)
    assert container["args"] == ["--config", "/etc/resharder/resharderd.yaml"]
    for key, value in environment(resources, container).items():
        monkeypatch.setenv(key, value)
    return load(file, {})


@pytest.mark.parametrize("version", sampled(VERSIONS, VERSIONS[-1:]))
def test_every_resource_is_one_that_kubernetes_takes(resources: list[Resource], version: str) -> None:
    known = [one for one in resources if one["apiVersion"] not in NOT_KUBERNETES]
    assert len(known) > 10
    for one in known:
        kubernetes_validate.validate(one, version, strict=True)


def test_everything_has_the_namespace_and_a_name_of_its_own(resources: list[Resource]) -> None:
    names = [(one["kind"], one["metadata"]["name"]) for one in resources]
    assert len(set(names)) == len(names)
    assert {one["metadata"].get("namespace") for one in resources if one["kind"] != "Namespace"} == {"resharder"}


def test_what_pods_refer_to_is_there(resources: list[Resource]) -> None:
    secrets = {one["spec"]["secretName"] for one in of(resources, "Certificate")}
    for owner in of(resources, "StatefulSet"):
        pod = owner["spec"]["template"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        volumes |= {claim["metadata"]["name"]: claim for claim in owner["spec"].get("volumeClaimTemplates", [])}
        assert of(resources, "ServiceAccount", pod["spec"]["serviceAccountName"])
        assert of(resources, "Service", owner["spec"]["serviceName"])[0]["spec"]["clusterIP"] == "None"
        mounted = {mount["name"] for container in containers(pod) for mount in container["volumeMounts"]}
        assert mounted == volumes.keys(), "volumes that nobody mounts, or mounts of none"
        assert {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume} <= secrets
        for volume in volumes.values():
            assert "configMap" not in volume or of(resources, "ConfigMap", volume["configMap"]["name"])
        for container in containers(pod):
            ports = {port["name"] for port in container.get("ports", [])}
            probes = [probe for key, probe in container.items() if key.endswith("Probe")]
            assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports
            assert container["image"].startswith("registry.example/")


def test_services_policies_and_budgets_are_about_pods_that_are_there(resources: list[Resource]) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(resources).items()}
    ports = {port["name"] for pod in pods(resources).values() for one in containers(pod) for port in one.get("ports", [])}

    def chosen(selector: dict[str, str]) -> set[str]:
        return {name for name, found in labels.items() if selector.items() <= found.items()}

    for service in of(resources, "Service"):
        assert len(chosen(service["spec"]["selector"])) == 1
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        for one in of(resources, kind):
            assert chosen(one["spec"][key].get("matchLabels", {})), one["metadata"]["name"]
    for name in labels:
        policies = [one["spec"] for one in of(resources, "NetworkPolicy")]
        found = [one["policyTypes"] for one in policies if name in chosen(one["podSelector"].get("matchLabels", {}))]
        assert {kind for kinds in found for kind in kinds} == {"Ingress", "Egress"}, "what no policy names is allowed"


def test_servers_reach_the_daemon_where_it_listens(
    resources: list[Resource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = daemon_configuration(resources, tmp_path, monkeypatch)
    (container,) = containers(pods(resources)["resharderd"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (config.listen, config.web_listen) == (f"0.0.0.0:{ports['grpc']}", f"0.0.0.0:{ports['web']}")
    *_, server = containers(pods(resources)["fleet"])
    host, _, port = environment(resources, server)["RESHARDER_ENDPOINT"].partition(":")
    assert port == str(ports["grpc"])
    (daemon,) = (
        one["metadata"]["name"] for one in of(resources, "Service") if "grpc" in {p["name"] for p in one["spec"]["ports"]}
    )
    assert host in (daemon, f"{daemon}.resharder")
    (secret,) = (v["secret"]["secretName"] for v in pods(resources)["resharderd"]["spec"]["volumes"] if "secret" in v)
    (certificate,) = (one for one in of(resources, "Certificate") if one["spec"]["secretName"] == secret)
    assert host in certificate["spec"]["dnsNames"], "the name that clients dial"


def test_every_name_in_the_daemons_roles_has_a_certificate_and_what_files_it_reads_are_mounted(
    resources: list[Resource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = daemon_configuration(resources, tmp_path, monkeypatch)
    assert config.security is not None
    names = {f"dns:{name}" for one in of(resources, "Certificate") for name in one["spec"].get("dnsNames", [])}
    assert config.security.roles.keys() <= names
    mounts = {mount["mountPath"] for one in containers(pods(resources)["resharderd"]) for mount in one["volumeMounts"]}
    for file in (config.security.certificate, config.security.key, config.security.client_ca):
        assert file is not None
        assert str(file.parent) in mounts
        assert file.name in ("tls.crt", "tls.key", "ca.crt"), "what cert-manager writes"
    assert str(config.store.parent) in mounts


def test_the_plugin_takes_the_environment_of_the_fleet(resources: list[Resource], tmp_path: Path) -> None:
    *_, server = containers(pods(resources)["fleet"])
    found = environment(resources, server)
    for name in ("ca.crt", "tls.crt", "tls.key"):  # what cert-manager writes
        (tmp_path / name).write_text("")
    there = {key: value.replace("/tls/", f"{tmp_path}/") for key, value in found.items()}
    assert there["RESHARDER_TLS_CA"] != found["RESHARDER_TLS_CA"]
    settings = PluginSettings.from_environment(there)
    assert (settings.model, settings.fleet, settings.server) == ("policy", "policy", "fleet-0")
    if server["name"] == "sglang":
        assert found["SGLANG_PLUGINS"] == "resharder"
        refuse_settings(settings)
        assert all("resharder-sglang:" in one["image"] for one in containers(pods(resources)["fleet"]))
    else:
        assert found["VLLM_PLUGINS"] == "resharder"
        assert "--load-format=resharder" in server["command"]


def test_the_readiness_probe_is_a_command_that_there_is(resources: list[Resource]) -> None:
    *_, server = containers(pods(resources)["fleet"])
    probe = server["readinessProbe"]
    command, name, *options = probe["exec"]["command"]
    assert command == "resharder"
    found = typer.main.get_command(app).commands[name].make_context(name, options).params  # type: ignore[attr-defined]
    assert found["url"] == "http://127.0.0.1:8000/health"
    assert found["max_lag_versions"] > 0
    assert found["max_lag_seconds"] > 0
    assert probe["timeoutSeconds"] >= 3 * 3, "the gate, and the daemon more than once, have three seconds each"


def test_a_server_is_never_restarted_for_a_shut_gate(resources: list[Resource]) -> None:
    *_, server = containers(pods(resources)["fleet"])
    passing = "/model_info" if server["name"] == "sglang" else "/version"
    assert passing == "/version" or passing in SGLANG_ROUTES.ungated
    assert {server[probe]["httpGet"]["path"] for probe in ("startupProbe", "livenessProbe")} == {passing}
    started = server["startupProbe"]
    assert started["periodSeconds"] * started["failureThreshold"] > 2 * PluginSettings.boot_wait_seconds


def test_what_lies_in_memory_fits_beside_the_rest(resources: list[Resource]) -> None:
    for pod in pods(resources).values():
        memory = {
            v["name"]: size(v["emptyDir"]["sizeLimit"]) for v in pod["spec"]["volumes"] if "medium" in v.get("emptyDir", {})
        }
        for container in pod["spec"]["containers"]:
            mounted = sum(memory.get(mount["name"], 0) for mount in container["volumeMounts"])
            given = container["resources"]
            assert given["requests"]["memory"] == given["limits"]["memory"], "it would be the first to be evicted"
            assert size(given["limits"]["memory"]) >= mounted + 2 * UNITS["Gi"]


def test_daemon_and_servers_have_time_to_drain(
    resources: list[Resource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = daemon_configuration(resources, tmp_path, monkeypatch)
    grace = pods(resources)["resharderd"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= config.drain_seconds + 15
    *_, server = containers(pods(resources)["fleet"])
    waits = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    given = (int(argument.partition("=")[2]) for argument in server["command"] if argument.startswith("--shutdown-timeout"))
    ends = next(given, 120)  # SGLang waits for requests without a bound of its own
    assert pods(resources)["fleet"]["spec"]["terminationGracePeriodSeconds"] >= waits + ends + 15


def test_pods_have_no_more_rights_than_they_need(resources: list[Resource]) -> None:
    for name, pod in pods(resources).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, name
            assert context["readOnlyRootFilesystem"] is True, name
            assert context["capabilities"] == {"drop": ["ALL"]}, name
    users = {
        (pod["spec"]["securityContext"]["runAsUser"], pod["spec"]["securityContext"]["fsGroup"])
        for pod in pods(resources).values()
    }
    assert len(users) == 1, "only one user shares memory with the daemon"


@pytest.mark.parametrize(
    ("overlay", "shared", "store"),
    [
        ("memory", False, lambda volume: volume.get("emptyDir", {}).get("medium") == "Memory"),
        ("disk", False, lambda volume: not volume),
        ("one-node", True, lambda volume: "hostPath" in volume),
        ("chart-memory", False, lambda volume: volume.get("emptyDir", {}).get("medium") == "Memory"),
        ("chart-disk", False, lambda volume: not volume),
        ("chart-host", True, lambda volume: "hostPath" in volume),
    ],
)
def test_versions_are_where_the_overlay_says(
    overlay: str, shared: bool, store: Callable[[Resource], bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = built(overlay)
    assert daemon_configuration(resources, tmp_path, monkeypatch).shared_memory == shared
    found = pods(resources)
    volumes = {volume["name"]: volume for volume in found["resharderd"]["spec"]["volumes"]}
    assert store(volumes.get("store", {}))
    (claims,) = (
        one["spec"].get("volumeClaimTemplates") for one in of(resources, "StatefulSet") if "fleet" not in one["metadata"]["name"]
    )
    assert bool(claims) == overlay.endswith("disk")
    where = {name: [m for m in [*containers(pod)][-1]["volumeMounts"] if m["name"] == "store"] for name, pod in found.items()}
    assert [mount["mountPath"] for mount in where["resharderd"]] == ["/store"]
    assert where["fleet"] == ([{"name": "store", "mountPath": "/store", "readOnly": True}] if shared else [])
    for namespace in of(resources, "Namespace"):  # Helm's user makes it
        assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == ("privileged" if shared else "restricted")


def test_an_overlay_of_ones_own_may_let_trainers_and_servers_reach_each_other(tmp_path: Path) -> None:
    (more,) = (one for one in extended(tmp_path, "direct-path") if one not in built("disk"))
    kubernetes_validate.validate(more, VERSIONS[-1], strict=True)
    assert more["spec"]["podSelector"]["matchLabels"].items() <= pods(built("disk"))["fleet"]["metadata"]["labels"].items()
    trainers = more["spec"]["ingress"][0]["from"]
    assert trainers == more["spec"]["egress"][0]["to"]
    assert {one["podSelector"]["matchLabels"]["resharder-role"] for one in trainers} == {"trainer"}


def test_an_overlay_of_ones_own_may_have_a_node_on_every_host_of_the_fleet(tmp_path: Path) -> None:
    made = extended(tmp_path, "nodes")
    for one in (one for one in made if one["apiVersion"] not in NOT_KUBERNETES):
        kubernetes_validate.validate(one, VERSIONS[-1], strict=True)
    (node,) = of(made, "DaemonSet")
    pod, fleet = node["spec"]["template"], pods(made)["fleet"]
    (container,) = containers(pod)
    given = {one["name"].removeprefix("RESHARDER_NODE_").lower(): one.get("value", "host-1") for one in container["env"]}
    config = NodeConfig(**given)
    assert config.endpoint == "resharderd:7677"
    assert config.tls is not None
    (certificate,) = of(made, "Certificate", "node")
    assert config.tls.peer_name in certificate["spec"]["dnsNames"]
    assert certificate["spec"]["secretName"] in {volume.get("secret", {}).get("secretName") for volume in pod["spec"]["volumes"]}
    for sharing in (pod, fleet):
        (mount,) = (m for m in [*containers(sharing)][-1]["volumeMounts"] if m["name"] == "node")
        (volume,) = (v for v in sharing["spec"]["volumes"] if v["name"] == "node")
        assert str(config.folder).startswith(f"{mount['mountPath']}/"), "a path that holds in both"
        assert volume["hostPath"]["path"] == "/mnt/resharder-node"
    users = {one["spec"]["securityContext"]["runAsUser"] for one in (pod, fleet)}
    assert len(users) == 1, "only one user shares memory with the node"
    (policy,) = of(made, "NetworkPolicy", "resharderd")
    roles = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"][0]["values"]
    assert pod["metadata"]["labels"]["resharder-role"] in roles


def test_a_standby_shares_the_store_and_may_change_its_lease_alone(tmp_path: Path) -> None:
    resources = extended(tmp_path, "standby")
    for each in resources:
        if each["apiVersion"] not in NOT_KUBERNETES:
            kubernetes_validate.validate(each, VERSIONS[-1], strict=True)
    (daemon,) = of(resources, "StatefulSet", "resharderd")
    pod = daemon["spec"]["template"]["spec"]
    assert (daemon["spec"]["replicas"], daemon["spec"]["updateStrategy"]) == (2, {"type": "OnDelete"})
    assert "volumeClaimTemplates" not in daemon["spec"]
    (claim,) = of(resources, "PersistentVolumeClaim", "resharderd-store")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert {"name": "store", "persistentVolumeClaim": {"claimName": "resharderd-store"}} in pod["volumes"]
    lease = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}["RESHARDERD_KUBERNETES_LEASE"]
    (role,) = of(resources, "Role", "resharderd")
    namespace, _, name = lease.partition("/")
    assert {each["metadata"]["namespace"] for each in (daemon, claim, role)} == {namespace}
    named = [rule for rule in role["rules"] if "resourceNames" in rule]
    assert [(rule["resourceNames"], rule["verbs"]) for rule in named] == [([name], ["get", "update"])]
    assert pod["serviceAccountName"] == of(resources, "RoleBinding", "resharderd")[0]["subjects"][0]["name"]
    assert pod["automountServiceAccountToken"]


def test_a_secret_seals_the_registry_that_nodes_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = extended(tmp_path, "registry-key")
    (daemon,) = of(resources, "StatefulSet", "resharderd")
    kubernetes_validate.validate(daemon, VERSIONS[-1], strict=True)
    pod = daemon["spec"]["template"]["spec"]
    for each in pod["containers"][0]["env"]:
        monkeypatch.setenv(each["name"], each["value"])
    key = load(None, {}).registry_key
    assert key is not None
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "registry-key")
    (mount,) = (mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "registry-key")
    comment = (KUBERNETES / "components" / "registry-key" / "kustomization.yaml").read_text()
    (secret, made) = re.findall(r"create secret generic (\S+) --from-literal=(\w+)=", comment)[0]
    assert (str(key), volume["secret"]["secretName"]) == (f"{mount['mountPath']}/{made}", secret)
    names = re.findall(r"set env statefulset/resharderd (\w+)(?:=true|-)$", comment, re.MULTILINE)
    assert names == ["RESHARDERD_FROM_NODES"] * 2
    (service,) = of(resources, "Service", "resharderd")
    assert service["spec"]["publishNotReadyAddresses"], "nodes find a daemon that waits for them"
    monkeypatch.setenv(names[0], "true")
    assert load(None, {}).from_nodes
