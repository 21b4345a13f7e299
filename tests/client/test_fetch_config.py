"""A server that starts gets the config of the version that it boots, not that of a job which has published nothing yet."""

import json
from pathlib import Path

from resharder.client.operator import Operator
from resharder.client.trainer.connect import connect

from tests.client.models import CONFIG, OPEN, connected, declared, publish_all, spread, weights
from tests.support.daemon import Daemon

OTHER = CONFIG | {"rope_theta": 5e5}


def fetched(daemon: Daemon, folder: Path, fleet: str = "") -> dict[str, object]:
    with Operator(daemon.endpoint) as operator:
        operator.fetch_config(folder, model="policy", fleet=fleet)
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


def test_fetch_config_gives_the_config_of_the_version_that_a_server_boots(daemon: Daemon, tmp_path: Path) -> None:
    (one,) = connected(daemon.endpoint, 1, "one")
    assert fetched(daemon, tmp_path / "first") == CONFIG, "of the publisher, before a version is READY"
    publish_all([one], 1, weights(1))[0].wait_ready(60)
    one.close()
    two = connect(daemon.endpoint, model="policy", job="two", rank=0, world_size=1, config=OTHER)
    OPEN.append(two)
    two.attach_tensors(declared(spread(1)[0]))
    assert fetched(daemon, tmp_path / "registered") == CONFIG
    publish_all([two], 1, weights(2))[0].wait_ready(60)
    assert fetched(daemon, tmp_path / "published") == OTHER
    with Operator(daemon.endpoint) as operator:
        operator.pin(version=1)
        assert fetched(daemon, tmp_path / "pinned") == CONFIG
        (event,) = (event for event in operator.events() if event.what == "config")
    assert event.subject == "models/policy/versions/2"
    assert "'rope_theta': 500000.0" in event.reason
