"""A real Prometheus, with the rules of deploy/, over daemons that answer at `web_listen`.

with Prometheus(tmp_path, [daemon]) as prometheus:
    prometheus.firing()     # {("ResharderServersLost", "policy"), …}: alerts and the fleets that they name

It scrapes and evaluates every second, and alerts fire without waiting for their `for`. `sooner` lowers a bound in seconds.
"""

import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import yaml

from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.tools import tool

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules.yaml"


class Prometheus:
    """A process with its files in `folder`."""

    def __init__(self, folder: Path, daemons: Sequence[Daemon], sooner: Mapping[str, str] = MappingProxyType({})) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        rules = yaml.safe_load(RULES.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule.pop("for", None)
            if rule["alert"] in sooner:
                before = rule["expr"]
                rule["expr"] = before.replace(*sooner[rule["alert"]].split(" -> "))
                assert rule["expr"] != before, rule["alert"]
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        targets = [{"targets": [str(daemon.options["web_listen"]) for daemon in daemons]}]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "resharder", "static_configs": targets}],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self._folder, self._program = folder, tool("prometheus", "prometheus")
        self._process: subprocess.Popen[bytes] | None = None

    def firing(self) -> set[tuple[str, str]]:
        """Alerts that fire, each with the fleet that it names, or none."""
        alerts = self._get("alerts")["alerts"]
        return {(one["labels"]["alertname"], one["labels"].get("fleet", "")) for one in alerts if one["state"] == "firing"}

    def _get(self, what: str) -> Any:
        with urllib.request.urlopen(f"http://{self._address}/api/v1/{what}", timeout=60) as answer:
            return json.load(answer)["data"]

    def _scrapes(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            targets = self._get("targets")["activeTargets"]
        except OSError:
            return False
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def __enter__(self) -> "Prometheus":
        command = [self._program, f"--config.file={self._folder / 'prometheus.yaml'}", f"--web.listen-address={self._address}"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--storage.tsdb.path={self._folder / 'data'}"], stdout=log, stderr=log, env={"PATH": os.defpath}
            )
        wait_until(self._scrapes, "Prometheus scrapes every daemon")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
