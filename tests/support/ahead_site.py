"""Three servers in a fleet that serves versions before they are READY, and the settings under which a fleet does not by default.

The servers are those of tests/support/simulated_fleet.py.
"""

from google.protobuf.field_mask_pb2 import FieldMask
from resharder.server.state.server import Worker
from resharder.server.state.server_events import Order
from resharder.v1 import operator_pb2, resources_pb2, server_pb2

from tests.support.simulated_fleet import AheadSimulation
from tests.support.simulated_fleet_servers import FLEET, NAMES, ServerModel


class Site(AheadSimulation):
    """Three servers on version 1, which is READY."""

    def __init__(self) -> None:
        super().__init__()
        self.set_up(resources_pb2.UpdateStrategy.ALL_AT_ONCE, 0, 1, approval=False, ahead=True)
        self.settle()

    def shows(self) -> list[int]:
        return [self.plants[name].shows(self.now) for name in NAMES]

    def offer(self) -> int:
        """A version that is UPLOADING, served by all."""
        number = self.versions.begin()
        self.fleets.tick()
        self.settle()
        assert self.shows() == [number] * 3, self.reasons()
        return number

    def until(self, name: str, kind: server_pb2.Order.Kind) -> tuple[ServerModel, Order]:
        """One server carries its orders out up to that of this kind, which is left to the test."""
        plant = self.plants[name]
        while True:
            assert plant.attachment is not None
            order = plant.attachment.orders.get_nowait()
            assert order is not None
            if order.kind == kind:
                return plant, order
            if order.kind not in (server_pb2.Order.RENEWED, server_pb2.Order.LEAD):
                self.obey(plant, order, fails=False)

    def installs(self) -> list[int]:
        return [view.server.installs for view in self.fleets.servers()]

    def set(self, **fields: object) -> None:
        """An operator's update of the fleet."""
        fleet = resources_pb2.Fleet(name=FLEET, **fields)  # type: ignore[arg-type]
        self.operations.update(operator_pb2.UpdateFleetRequest(fleet=fleet, update_mask=FieldMask(paths=list(fields))))

    def staged_only(self, name: str) -> None:
        """From now on, a server's worker cannot take versions over the direct path."""
        plain = self.report

        def report(plant: ServerModel, state: resources_pb2.Worker.State, version: int, install: str, error: str) -> None:
            if plant.id != name:
                return plain(plant, state, version, install, error)
            fingerprint = plant.held_as if plant.holds else ""
            worker = Worker(0, state, version, install, error, plant.nonce, fingerprint)
            return self.fleets.report_worker(name, worker)

        self.report = report  # type: ignore[method-assign]
        self.report_state(self.plants[name])


def strategy(kind: resources_pb2.UpdateStrategy.Kind) -> dict[str, object]:
    return {"strategy": resources_pb2.UpdateStrategy(kind=int(kind))}  # type: ignore[arg-type]


WITH_OTHERS: list[tuple[dict[str, object], str]] = [
    (strategy(resources_pb2.UpdateStrategy.ROLLING), "default of a fleet that moves ROLLING"),
    (strategy(resources_pb2.UpdateStrategy.CANARY), "default of a fleet that moves CANARY"),
    (strategy(resources_pb2.UpdateStrategy.ATOMIC), "default of a fleet that moves ATOMIC"),
    ({"max_skew": 2}, "default of a fleet with a skew bound of 2"),
]
"""Settings under which servers do not move each for itself."""
