"""The chart: what its values change, and what it refuses. `test_kubernetes.py` checks its manifests beside those of kustomize."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from resharder.client.rpc.tls import Tls

from tests.support import helm
from tests.support.helm import Refused

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yaml"
PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
Resource = dict[str, Any]
TWO = [
    {"name": "policy", "model": "policy", "args": ["--tensor-parallel-size=2"], "gpus": 2},
    {
        "name": "judge",
        "model": "reward",
        "replicas": 4,
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-L4"},
        "tolerations": [{"key": "judges", "operator": "Exists"}],
        "env": {"RESHARDER_HOLD_SECONDS": "30"},
        "maxUnavailable": 2,
    },
]
TRAINER = {"enabled": True, "image": "registry.example/trainer:1", "command": ["torchrun", "train.py"]}


def of(resources: list[Resource], kind: str) -> dict[str, Resource]:
    return {one["metadata"]["name"]: one for one in resources if one["kind"] == kind}


def pod(workload: Resource) -> Resource:
    found: Resource = workload["spec"]["template"]["spec"]
    return found


def daemon_options(resources: list[Resource]) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(of(resources, "ConfigMap")["resharder-daemon"]["data"]["resharderd.yaml"])
    return found


def certificates(resources: list[Resource]) -> dict[str, list[str]]:
    """Names in the certificate of each secret."""
    return {one["spec"]["secretName"]: one["spec"].get("dnsNames", []) for one in of(resources, "Certificate").values()}


def roles(resources: list[Resource], secret: str) -> list[str]:
    (name,) = certificates(resources)[secret]
    found: list[str] = daemon_options(resources)["security"]["roles"][f"dns:{name}"]
    return found


def test_helms_linter_has_nothing_to_say() -> None:
    assert helm.findings({"fleets": TWO, "trainer": TRAINER, "serviceMonitor": {"enabled": True}}) == []


def test_the_values_of_the_page_are_ones_that_the_chart_takes() -> None:
    (values,) = re.findall(r"^```yaml\n(# values\.yaml\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    resources = helm.resources(yaml.safe_load(values))
    assert of(resources, "StatefulSet").keys() == {"resharder-daemon", "resharder-fleet-policy", "resharder-fleet-judge"}
    assert len(of(resources, "ServiceMonitor")) == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"storre": {}}, "storre"),
        ({"store": {"kind": "tape"}}, "'memory', 'disk', 'host'"),
        ({"store": {"sizeGi": "40Gi"}}, "want integer"),
        ({"store": {"sizeGi": 0}}, "/store/sizeGi"),
        ({"store": {"kind": "host"}}, "store.kind host needs daemon.nodeSelector"),
        ({"fleets": []}, "/fleets"),
        ({"fleets": [{"name": "policy"}]}, "model"),
        ({"fleets": [{"name": "Policy", "model": "policy"}]}, "/fleets/0/name"),
        (
            {"fleets": [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]},
            "two fleets are named a: give each its own name",
        ),
        ({"fleets": [{"name": "a", "model": "m", "memoryGi": 32}]}, "memoryGi 32 has to be at least 2 more than shmGi 32"),
        ({"fleets": [{"name": "a", "model": "m", "gpus": -1}]}, "/fleets/0/gpus"),
        ({"fleets": [{"name": "a", "model": "m", "engine": "triton"}]}, "/fleets/0/engine"),
        ({"fleets": [{"name": "a", "model": "m", "env": {"SGLANG_PLUGINS": ""}}]}, "env of fleet a has SGLANG_PLUGINS"),
        ({"fleets": [{"name": "a", "model": "m", "maxUnavailable": 0}]}, "/fleets/0/maxUnavailable"),
        ({"fleets": [{"name": "a", "model": "m", "args": ["tensor-parallel-size"]}]}, "/fleets/0/args/0"),
        ({"fleets": [{"name": "a", "model": "m", "env": {"RESHARDER_MODEL": "other"}}]}, "env of fleet a has RESHARDER_MODEL"),
        ({"fleets": [{"name": "a", "model": "m", "tolerations": [{"effect": "Never"}]}]}, "/fleets/0/tolerations/0/effect"),
        ({"daemon": {"options": {"listen": "0.0.0.0:1"}}}, "daemon.options has listen, which the chart writes itself"),
        ({"daemon": {"roles": {"dns:ops.example": ["admin"]}}}, "/daemon/roles"),
        ({"tls": {"issuer": {"name": "vault"}}}, "/tls/issuer"),
        ({"tls": {"duration": "90 days"}}, "/tls/duration"),
        ({"trainer": {"enabled": True}}, "/trainer"),
        ({"networkPolicies": {"clientNamespaces": {"team": 1}}}, "/networkPolicies/clientNamespaces/team"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_values_that_make_no_sense_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        helm.resources(values)


@pytest.mark.parametrize("values", [{}, {"fleets": [{"name": "a" * 40, "model": "m"}]}], ids=["the release", "a fleet"])
def test_names_that_pods_cannot_have_are_refused(values: dict[str, Any]) -> None:
    release = "r" * 50 if not values else "resharder"
    with pytest.raises(Refused, match="is too long for a StatefulSet"):
        helm.resources(values, release)


def test_each_fleet_has_its_own_servers_certificate_role_and_disruption_budget() -> None:
    resources = helm.resources({"fleets": TWO})
    for name, model, replicas, unavailable in (("policy", "policy", 2, 1), ("judge", "reward", 4, 2)):
        known = f"resharder-fleet-{name}"
        fleet = of(resources, "StatefulSet")[known]
        assert fleet["spec"]["replicas"] == replicas
        (container,) = pod(fleet)["containers"]
        given = {one["name"]: one.get("value") for one in container["env"]}
        assert (given["RESHARDER_FLEET"], given["RESHARDER_MODEL"]) == (name, model)
        (secret,) = (volume["secret"]["secretName"] for volume in pod(fleet)["volumes"] if "secret" in volume)
        assert roles(resources, secret) == [f"server:{name}", "viewer"]
        assert of(resources, "PodDisruptionBudget")[known]["spec"]["maxUnavailable"] == unavailable
        selector = of(resources, "PodDisruptionBudget")[known]["spec"]["selector"]["matchLabels"]
        assert selector == fleet["spec"]["selector"]["matchLabels"]
    assert roles(resources, "resharder-client-trainer-tls") == ["publisher:policy", "publisher:reward"]


def test_gpus_tolerations_node_selectors_arguments_and_variables_reach_the_pods_of_their_fleet() -> None:
    fleets = of(helm.resources({"fleets": TWO}), "StatefulSet")
    policy, judge = pod(fleets["resharder-fleet-policy"]), pod(fleets["resharder-fleet-judge"])
    assert "nodeSelector" not in policy
    assert policy["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert policy["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert policy["containers"][0]["command"][-1] == "--tensor-parallel-size=2"
    assert judge["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    assert judge["tolerations"] == [{"key": "judges", "operator": "Exists"}]
    assert {"name": "RESHARDER_HOLD_SECONDS", "value": "30"} in judge["containers"][0]["env"]
    assert {"name": "RESHARDER_HOLD_SECONDS", "value": "30"} not in policy["containers"][0]["env"]


def test_fleets_of_both_engines_are_in_one_release() -> None:
    fleets = [
        {"name": "policy", "model": "policy"},
        {"name": "fast", "model": "policy", "engine": "sglang", "args": ["--tp-size=2"]},
    ]
    found = of(helm.resources({"fleets": fleets}), "StatefulSet")
    for name, engine, option in (("policy", "vllm", "--load-format=resharder"), ("fast", "sglang", "--tp-size=2")):
        spec = pod(found[f"resharder-fleet-{name}"])
        (container,) = spec["containers"]
        assert container["name"] == engine
        assert option in container["command"]
        assert {one["image"].split("/")[-1].split(":")[0] for one in (*spec["initContainers"], container)} == {
            f"resharder-{engine}"
        }
        plugins = {one["name"] for one in container["env"] if one["name"].endswith("_PLUGINS")}
        assert plugins == {f"{engine.upper()}_PLUGINS"}


def test_an_issuer_of_the_cluster_takes_the_place_of_the_charts_authority() -> None:
    own, other = helm.resources({}), helm.resources({"tls": {"issuer": {"name": "vault", "kind": "ClusterIssuer"}}})
    assert of(own, "Issuer").keys() == {"resharder-beginning", "resharder-authority"}
    assert of(other, "Issuer") == {}
    assert certificates(other) == {secret: names for secret, names in certificates(own).items() if "authority" not in secret}
    refs = [one["spec"]["issuerRef"] for one in of(other, "Certificate").values()]
    assert all(ref == {"name": "vault", "kind": "ClusterIssuer"} for ref in refs)


def test_options_reach_the_daemon_which_restarts_for_them() -> None:
    before, after = helm.resources({}), helm.resources({"daemon": {"options": {"keep_count": 2}}})
    assert daemon_options(after) == daemon_options(before) | {"keep_count": 2}
    found = [
        of(each, "StatefulSet")["resharder-daemon"]["spec"]["template"]["metadata"]["annotations"] for each in (before, after)
    ]
    assert found[0] != found[1]


def test_more_roles_are_added_and_take_none_away() -> None:
    added = {"dns:*.ops.example": ["operator"], "dns:operator.resharder.resharder": ["viewer"]}
    resources = helm.resources({"daemon": {"roles": added}})
    found = daemon_options(resources)["security"]["roles"]
    assert found["dns:*.ops.example"] == ["operator"]
    assert roles(resources, "resharder-client-operator-tls") == ["operator"]


def test_service_monitors_find_services_and_certificates_and_name_the_jobs_of_the_rules() -> None:
    assert of(helm.resources({}), "ServiceMonitor") == {}
    resources = helm.resources({"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}})
    jobs = set()
    for monitor in of(resources, "ServiceMonitor").values():
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [one for one in of(resources, "Service").values() if wanted <= one["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert len(chosen) == 1
        assert endpoint["port"] in {port["name"] for port in chosen[0]["spec"]["ports"]}
        (relabeling,) = endpoint["relabelings"]
        assert relabeling["targetLabel"] == "job"
        jobs.add(relabeling["replacement"])
        if tls := endpoint.get("tlsConfig"):
            (secret,) = {tls["ca"]["secret"]["name"], tls["cert"]["secret"]["name"], tls["keySecret"]["name"]}
            assert roles(resources, secret) == ["viewer"]
            assert tls["serverName"] in certificates(resources)["resharder-daemon-tls"]
    assert jobs >= set(re.findall(r'job="(\w+)"', RULES.read_text()))


def test_a_training_job_may_publish_and_reaches_the_daemon(tmp_path: Path) -> None:
    assert of(helm.resources({}), "Job") == {}
    resources = helm.resources({"trainer": TRAINER})
    job = of(resources, "Job")["resharder-trainer"]
    kubernetes_validate.validate(job, "1.34", strict=True)
    (container,) = pod(job)["containers"]
    given = {one["name"]: one["value"] for one in container["env"]}
    (secret,) = (volume["secret"]["secretName"] for volume in pod(job)["volumes"] if "secret" in volume)
    assert roles(resources, secret) == ["publisher:policy"]
    for name in ("ca.crt", "tls.crt", "tls.key"):  # what cert-manager writes
        (tmp_path / name).write_text("")
    tls = Tls.from_environment({key: value.replace("/tls/", f"{tmp_path}/") for key, value in given.items()})
    assert tls is not None
    policy = of(resources, "NetworkPolicy")["resharder-daemon"]
    clients = [one for one in policy["spec"]["ingress"][0]["from"] if one.keys() == {"podSelector"}]
    assert any(
        job["spec"]["template"]["metadata"]["labels"]["resharder-role"] in expression["values"]
        for one in clients
        for expression in one["podSelector"].get("matchExpressions", [])
    )


def test_the_direct_path_opens_servers_and_trainers_to_each_other() -> None:
    closed, opened = (
        of(helm.resources({"networkPolicies": {"directPath": each}}), "NetworkPolicy")["resharder-fleets"]["spec"]
        for each in (False, True)
    )
    (more,) = [rule for rule in opened["ingress"] if rule not in closed["ingress"]]
    (also,) = [rule for rule in opened["egress"] if rule not in closed["egress"]]
    assert more["from"] == also["to"]
    assert "ports" not in more


def test_without_network_policies_there_are_none() -> None:
    assert of(helm.resources({"networkPolicies": {"enabled": False}}), "NetworkPolicy") == {}


def test_releases_in_one_namespace_do_not_share_a_name() -> None:
    one, other = ({(each["kind"], each["metadata"]["name"]) for each in helm.resources({}, name)} for name in ("one", "other"))
    assert not one & other


def test_notes_say_where_certificates_are_and_how_a_fleet_of_another_models_name_is_created() -> None:
    text = helm.notes({"fleets": TWO})
    assert "resharder-client-trainer-tls" in text
    assert "resharder fleet set judge --model reward" in text
    assert "fleet set policy" not in text
