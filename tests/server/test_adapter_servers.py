"""Servers of adapters: an adapter is loaded beside its base alone, whichever the daemon knows first."""

from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
import torch
from resharder.client import connect
from resharder.server.fleets.fleets import Fleets
from resharder.server.state.server import Settings, Worker
from resharder.server.state.server_events import Attached, Reported
from resharder.server.state.version import VersionRecord
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

from tests.support.daemon import Daemon
from tests.support.simulated_store import SimulatedVersions
from tests.support.waits import completed

QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
ITEMS = [(f"{QUERY}.lora_A.weight", torch.ones(4, 8)), (f"{QUERY}.lora_B.weight", torch.ones(6, 4))]
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon() as running:
        yield running


def publish(daemon: Daemon, model: str, base: str) -> None:
    with connect(daemon.endpoint, model=model, base=base, job=model, rank=0, world_size=1, config=CONFIG) as publisher:
        publisher.publish_tensors(1, ITEMS).wait_ready(60)


def claim(daemon: Daemon, server: str, model: str, base_server: str = "") -> str:
    """The reason of a claim's refusal; empty if it is granted."""
    request = server_pb2.ClaimServerRequest(server=server, model=model, base_server=base_server, renews=True)
    try:
        server_pb2_grpc.ServerServiceStub(daemon.channel).ClaimServer(request, timeout=30)
    except grpc.RpcError as error:
        return str(error.details())
    return ""


def test_a_server_claims_an_adapter_beside_its_base_alone(daemon: Daemon) -> None:
    publish(daemon, "policy-lora", "policy")
    assert claim(daemon, "one", "policy") == claim(daemon, "two", "other") == ""
    assert claim(daemon, "one.policy-lora", "policy-lora", "one") == ""
    assert claim(daemon, "two.policy-lora", "policy-lora", "two") == (
        "policy-lora is an adapter of policy, and server two follows other"
    )
    assert claim(daemon, "three", "policy-lora") == (
        "policy-lora is an adapter of policy: a server follows it by RESHARDER_ADAPTERS beside policy"
    )


class Versions(SimulatedVersions):
    """A store of adapter `lora` of `policy`, and of models of their own."""

    def models(self) -> list[str]:
        return ["policy", "other", "lora"]

    def versions(self, name: str) -> list[VersionRecord]:
        return [replace(each, model=name, base="policy" if name == "lora" else "") for each in super().versions(name)]


def following(model: str, *, host_first: bool) -> tuple[Fleets, list[int]]:
    """A server of adapter `lora`, which claimed before it had a version, on one of `model`; and the orders that it got."""
    versions = Versions()
    fleets = Fleets(versions, versions, settings=Settings(lease=10, grace=10, boot=30, forget=1000), tick_seconds=0)
    claims = [("two", model, ""), ("two.lora", "lora", "two")]
    for id, followed, base_server in claims if host_first else claims[::-1]:
        completed(fleets.claim, id, followed, "", wait_seconds=0, boot=False, renews=True, base_server=base_server)
    attachment = fleets.attach("two.lora", Attached("control", 1, "10.0.0.1:8000"))
    fleets.report_worker("two.lora", Worker(0, resources_pb2.Worker.EMPTY, 0, process="p"))
    versions.publish()
    versions.version_changed.emit(versions.versions("lora")[-1])
    fleets.tick()
    attachment.report(Reported("control", "", server_pb2.Order.LEAD))
    orders = [attachment.orders.get_nowait() for _ in range(attachment.orders.qsize())]
    return fleets, [order.kind for order in orders if order is not None]


@pytest.mark.parametrize("host_first", [True, False])
def test_an_adapter_whose_base_is_known_after_the_claim_is_loaded_beside_that_base_alone(host_first: bool) -> None:
    assert server_pb2.Order.STAGE in following("policy", host_first=host_first)[1]
    fleets, orders = following("other", host_first=host_first)
    assert server_pb2.Order.STAGE not in orders
    assert fleets.by_id["two.lora"].goal.why == "lora is an adapter of policy, and server two follows other"
