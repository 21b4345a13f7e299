"""Alerts: each fires when it should and only then, stands in the runbook, and asks for metrics that the daemon exports."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown.extensions.toc import slugify
from prometheus_client import CollectorRegistry
from resharder.client.inference.control.metrics import Numbers
from resharder.server.observability import metrics

from tests.support.tools import checked, tool

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((PROMETHEUS / "rules.yaml").read_text())["groups"] for rule in group["rules"]
]
NAMED = re.compile(r"\bresharder_[a-z0-9_]+")


def exported() -> set[str]:
    """Every sample's name that Prometheus can get of a daemon, or of a plugin."""
    daemon, _ = metrics.make("test")
    metrics.show(daemon, lambda: metrics.states.NOTHING)
    Numbers(vllm := CollectorRegistry())
    Numbers(sglang := CollectorRegistry(), engine="sglang")
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    return {
        f"{family.name}{suffix}"
        for collector in [*daemon._collector_to_names, *vllm._collector_to_names, *sglang._collector_to_names]
        for family in (collector.describe() if hasattr(collector, "describe") else collector.collect())
        for suffix in suffixes.get(family.type, ("",))
    }


def test_the_rules_are_rules_and_the_configurations_are_configurations() -> None:
    promtool = tool("promtool", "prometheus")
    checked(promtool, "check", "rules", PROMETHEUS / "rules.yaml")
    checked(promtool, "check", "config", PROMETHEUS / "prometheus.yaml")
    checked(promtool, "check", "config", "--syntax-only", PROMETHEUS / "kubernetes.yaml")


def test_alerts_fire_when_they_should_and_only_then() -> None:
    checked(tool("promtool", "prometheus"), "test", "rules", PROMETHEUS / "rules_test.yaml")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_test_a_severity_and_its_section_in_the_runbook(rule: dict[str, Any]) -> None:
    name = rule["alert"]
    assert f'{{alertname="{name}"}}' in (PROMETHEUS / "rules_test.yaml").read_text()
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (page, anchor) == ("docs/runbook.md", slugify(name, "-")), "the anchor that the site has"
    sections = re.split(r"^### ", (ROOT / "docs/runbook.md").read_text(), flags=re.MULTILINE)[1:]
    (section,) = (section for section in sections if section.partition("\n")[0] == name)
    assert "**Means.**" in section
    assert "**Do.**" in section


def test_the_runbook_has_no_alert_that_there_is_not() -> None:
    found = re.findall(r"^### (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert sorted(found) == sorted(rule["alert"] for rule in RULES)


@pytest.mark.parametrize("file", ["prometheus/rules.yaml", "prometheus/rules_test.yaml", "grafana/resharder.json"])
def test_every_metric_that_is_asked_for_is_exported(file: str) -> None:
    named = set(NAMED.findall((ROOT / "deploy" / file).read_text()))
    assert len(named) > 10
    assert named <= exported()
