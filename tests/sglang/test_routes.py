"""The table of SGLang's routes, compared with those of the installed SGLang."""

import json
import os
import subprocess
import sys

from resharder.client.inference.sglang.routes import ROUTES, RULES
from sglang.version import __version__

from tests.support.sglang_server import environment

OTHERS = {  # routes that this release does not have, and others do
    "0.5.17": {"/begin_weight_update", "/end_weight_update", "/pd_role_switch", "/ready", "/v1/decisions", "/v1/systemone"},
    "0.5.23": {"/clear_hicache_storage_backend"},
}[__version__]
_LIST = """
import json
from sglang.srt.entrypoints.http_server import app
print(json.dumps([[method, route.path] for route in app.routes for method in getattr(route, "methods", None) or ()]))
"""


def test_every_route_that_may_change_the_engine_has_a_rule() -> None:
    run = subprocess.run([sys.executable, "-c", _LIST], env={**os.environ, **environment()}, capture_output=True, check=True)
    routes = {(method, path) for method, path in json.loads(run.stdout.splitlines()[-1])}
    assert {route for route in routes if route[0] not in ("GET", "HEAD")} - RULES.keys() == set()
    assert {path for _, path in RULES.keys() - routes} <= OTHERS, "rules of routes that are gone"
    mounted = {"/metrics", "/metrics/"}  # with --enable-metrics
    assert {("GET", path) for path in (ROUTES.ungated | ROUTES.health) - mounted - OTHERS} <= routes
