"""The daemon's configuration of the manifests, run: each that has a certificate there can do its work, and no more."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from resharder.client import Operator, connect
from resharder.client.errors import AccessDenied

from tests.client.models import CONFIG, weights
from tests.support.command import resharder
from tests.support.daemon import Daemon
from tests.support.observing import wait_serving
from tests.support.ports import free_port
from tests.support.secure import Authority
from tests.support.simulated_server import SimulatedServer

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base" / "resharderd.yaml"
TRAINER, FLEET, OPERATOR, PROMETHEUS = (
    "policy.trainer.resharder",
    "policy.fleet.resharder",
    "operator.resharder",
    "prometheus.resharder",
)


class Deployed(Daemon):
    """As in a pod, but for where it listens and where its files are. Its own channel is the operator's."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "tls")
        files = {"/tls/tls.crt": "daemon.pem", "/tls/tls.key": "daemon.key", "/tls/ca.crt": "ca.pem"}
        text = CONFIGURATION.read_text()
        for there, here in files.items():
            assert there in text
            text = text.replace(there, str(self.authority.folder / here))
        (folder / "resharderd.yaml").write_text(text)
        self.web = f"127.0.0.1:{free_port()}"
        super().__init__(config=folder / "resharderd.yaml", web_listen=self.web)

    def connect(self, options: list[tuple[str, int]]) -> grpc.Channel:
        return self.channel_of(OPERATOR, options)

    def channel_of(self, name: str, options: list[tuple[str, int]]) -> grpc.Channel:
        return grpc.secure_channel(self.endpoint, self.authority.tls(name).credentials(), options=options)

    def status_of(self, path: str, name: str = "") -> int:
        tls = self.authority.tls(name)
        context = ssl.create_default_context(cafile=str(tls.ca))
        if name:
            context.load_cert_chain(tls.certificate, tls.key)
        try:
            with urllib.request.urlopen(f"https://{self.web}{path}", timeout=60, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Deployed]:
    with Deployed(tmp_path) as running:
        yield running


def test_trainer_fleet_operator_and_prometheus_do_their_work_and_no_more(
    daemon: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = daemon.authority.tls
    with connect(daemon.endpoint, model="policy", config=CONFIG, rank=0, world_size=1, tls=tls(TRAINER)) as trainer:
        trainer.publish_tensors(1, weights(1).items()).wait_ready(60)
    with (
        daemon.channel_of(FLEET, [("grpc.use_local_subchannel_pool", 1)]) as channel,
        SimulatedServer(SimpleNamespace(channel=channel), "fleet-0"),
    ):
        assert wait_serving(daemon, 1).name == "servers/fleet-0"
        for name, value in daemon.authority.environment(FLEET).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RESHARDER_SERVER_ID", "fleet-0")
        done = resharder("probe", "--max-lag-versions", 5, "--endpoint", daemon.endpoint)
        assert (done.code, done.out) == (0, "ready: servers/fleet-0 serves version 1, its target\n")
    for name in (TRAINER, FLEET, PROMETHEUS):
        with Operator(daemon.endpoint, tls=tls(name)) as other, pytest.raises(AccessDenied):
            other.set_fleet("policy", max_skew=2)
    for name in (FLEET, OPERATOR, PROMETHEUS, "policy.stranger.resharder"):
        with pytest.raises(AccessDenied), connect(daemon.endpoint, model="policy", config=CONFIG, tls=tls(name)) as other:
            other.publish_tensors(2, weights(2).items())
    with Operator(daemon.endpoint, tls=tls(OPERATOR)) as operator:
        assert [version.number for version in operator.versions()] == [1]
        assert operator.fleet("policy").max_skew == 0
        assert operator.set_fleet("policy", max_skew=2).max_skew == 2


def test_probes_need_no_certificate_and_metrics_do(daemon: Deployed) -> None:
    assert [daemon.status_of(path) for path in ("/healthz", "/readyz")] == [200, 200]
    assert daemon.status_of("/metrics", PROMETHEUS) == 200
    assert daemon.status_of("/metrics") in (401, 403)
    assert daemon.status_of("/metrics", TRAINER) == 403
