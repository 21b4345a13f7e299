"""The dashboard: its queries are PromQL, and its panels stand beside each other."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tools import checked, tool

GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana"
VARIABLES = {"$__rate_interval": "5m", "$fleet": "policy", "$model": "policy"}


@pytest.fixture
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GRAFANA / "resharder.json").read_text())
    return found


def queries(dashboard: dict[str, Any]) -> list[str]:
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [*found, *(annotation["expr"] for annotation in dashboard["annotations"]["list"])]


def test_every_query_is_promql(dashboard: dict[str, Any], tmp_path: Path) -> None:
    rules = []
    for number, query in enumerate(queries(dashboard)):
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        assert "$" not in query, "a variable that the dashboard does not have"
        rules.append({"record": f"query_{number}", "expr": query})
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(rules)} rules found" in checked(tool("promtool", "prometheus"), "check", "rules", file)


def test_variables_are_asked_of_the_datasource_that_is_chosen(dashboard: dict[str, Any]) -> None:
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert names == {"datasource", "model", "fleet"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard))) - {"__rate_interval", "__all"}
    assert used == names
    sources = [
        one["datasource"]["uid"]
        for panel in dashboard["panels"]
        for one in (panel, *panel.get("targets", []))
        if "targets" in panel
    ]
    assert set(sources) == {"${datasource}"}


def test_panels_have_a_title_and_a_place_of_their_own(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


def test_grafana_is_given_the_dashboard_and_a_prometheus() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/resharder.yaml").read_text())["providers"]
    compose = yaml.safe_load((GRAFANA.parent / "compose/compose.yaml").read_text())
    mounted = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/resharder.json" in mounted
