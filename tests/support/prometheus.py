"""A real Prometheus, with the rules of deploy/, over daemons that answer at `web_listen`.

with Prometheus(tmp_path, [daemon]) as prometheus:
    prometheus.firing()     # {("ResharderServersLost", "policy"), …}: alerts and the fleets that they name

It scrapes and evaluates every second, and alerts fire at once, without their `for`. `sooner` replaces a part of an expression.
"""

import http.client
import json
import os
import subprocess
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

    def __init__(
        self, folder: Path, daemons: Sequence[Daemon], sooner: Mapping[str, tuple[str, str]] = MappingProxyType({})
    ) -> None:
        self._address = f"127.0.0.1:{free_port()}"
        rules = yaml.safe_load(RULES.read_text())
        for rule in (rule for group in rules["groups"] for rule in group["rules"]):
            rule.pop("for", None)
            if rule["alert"] in sooner:
                assert sooner[rule["alert"]][0] in rule["expr"], rule["expr"]
                rule["expr"] = rule["expr"].replace(*sooner[rule["alert"]])
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
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            connection.request("GET", f"/api/v1/{what}")
            return json.load(connection.getresponse())["data"]
        finally:
            connection.close()

    def _scrapes(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            targets = self._get("targets")["activeTargets"]
        except (OSError, ValueError):  # it does not listen, or is not ready
            return False
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def __enter__(self) -> "Prometheus":
        command = [self._program, f"--config.file={self._folder / 'prometheus.yaml'}", f"--web.listen-address={self._address}"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--storage.tsdb.path={self._folder / 'data'}"], stdout=log, stderr=log, env={"PATH": os.defpath}
            )
        try:
            wait_until(self._scrapes, "Prometheus scrapes every daemon")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(60)
