"""Write docs/metrics.md from the metrics that the daemon and the vLLM plugin declare; a test compares.

python -m tools.metrics_page
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from resharder.client.inference.control.metrics import Numbers
from resharder.server.observability import metrics
from resharder.server.observability.metrics.gauges import NOTHING, families

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

_HEAD = """\
# Metrics

<!-- Made by `make docs-metrics` from `server/observability/metrics` and `client/inference/control/metrics.py`. -->

The daemon serves Prometheus' text format, and OpenMetrics on request, at `/metrics` of `web_listen`
(`127.0.0.1:7678`), beside the [status page](operator.md#the-status-page) and the probes. With security, the caller needs the role
`viewer`:

```yaml
scrape_configs:
  - job_name: resharder
    static_configs: [{targets: ["daemon:7678"]}]
    scheme: https                                                  # the last three with security
    authorization: {credentials_file: /etc/prometheus/resharder-token}
    tls_config: {ca_file: /etc/prometheus/resharder-ca.crt}
```

vLLM servers include the plugin's metrics in their own `/metrics`, aggregated over all API servers.

Labels are models, fleets, transports, phases, states and reasons. Versions are values, never labels, and servers are not labels:
`resharder status` and the status page list them. Times are in seconds, sizes in bytes. Compute rates with queries:

| question | query |
|---|---|
"""
_QUERIES = {
    "rate of uploads": "sum by (transport) (rate(resharder_received_bytes_total[5m]))",
    "upload rate of slots, median": (
        "histogram_quantile(0.5, sum by (le, transport) (rate(resharder_slot_upload_bytes_per_second_bucket[1h])))"
    ),
    "wait of requests for an install, 99th percentile": (
        "histogram_quantile(0.99, sum by (le) (rate(resharder_vllm_request_wait_seconds_bucket[1h])))"
    ),
    "fleets that lag for a minute": "resharder_fleet_lag_seconds > 60",
    "duration of installs by phase": (
        "rate(resharder_install_phase_seconds_sum[1h]) / rate(resharder_install_phase_seconds_count[1h])"
    ),
    "servers with an expired lease": "resharder_vllm_lease_expiry_timestamp_seconds < time()",
}


def page() -> str:
    daemon, _ = metrics.make("")
    plugin = CollectorRegistry()
    Numbers(plugin)
    questions = [f"| {question} | `{query}` |" for question, query in _QUERIES.items()]
    process = "`process_*`: the daemon's processor time, memory, open files and start time."
    ours, theirs = _rows([*_collectors(daemon), *families(NOTHING)]), _rows(_collectors(plugin))
    parts = [_HEAD + "\n".join(questions), "", "## The daemon", "", *_table(ours), "", process, "", "## vLLM servers", ""]
    return "\n".join([*parts, *_table(theirs), ""])


def _collectors(registry: CollectorRegistry) -> list[Any]:
    return list(registry._collector_to_names)  # prometheus_client has no public list


def _table(rows: Iterable[str]) -> list[str]:
    return ["| metric | type | labels | meaning |", "|---|---|---|---|", *rows]


def _rows(collectors: Iterable[Any]) -> list[str]:
    found = []
    for collector in collectors:
        if isinstance(collector, ProcessCollector):
            continue
        labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ()))
        for family in [collector] if isinstance(collector, Metric) else collector.describe():
            name = family.name + ("_total" if family.type == "counter" else "")
            found.append(f"| `{name}` | {family.type} | {labels or '–'} | {family.documentation} |")
    return found


if __name__ == "__main__":
    PAGE.write_text(page())
    print(PAGE)
