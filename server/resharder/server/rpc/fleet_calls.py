"""Operators' calls that change fleets and servers."""

from google.protobuf.message import Message
from resharder.server.fleets.commands import Operations
from resharder.server.fleets.fleets import Fleets
from resharder.server.rpc.convert import fleet_to_proto
from resharder.server.rpc.dispatch import Call
from resharder.v1 import operator_pb2


class FleetCalls:
    """Methods of `OperatorService` that change fleets and servers. Errors are those of the parts that each method calls."""

    def __init__(self, fleets: Fleets, operations: Operations) -> None:
        self._changes, self._operations = fleets.changes, operations

    def UpdateFleet(self, request: operator_pb2.UpdateFleetRequest, call: Call) -> Message:
        """Set the fields of a fleet that the mask names; a new fleet is created."""
        return fleet_to_proto(self._operations.update(request))

    def RollBackFleet(self, request: operator_pb2.RollBackFleetRequest, call: Call) -> Message:
        """Return a fleet to an earlier version. Idempotent for a repeated request id."""
        return fleet_to_proto(self._operations.roll_back(request))

    def DecideMove(self, request: operator_pb2.DecideMoveRequest, call: Call) -> Message:
        """Approve or reverse the current move of a fleet."""
        return fleet_to_proto(self._operations.decide(request))

    def SetPower(self, request: operator_pb2.SetPowerRequest, call: Call) -> Message:
        """Put servers to sleep or wake them. Returns before the engines have changed."""
        return fleet_to_proto(self._operations.set_power(request))

    def SetDrained(self, request: operator_pb2.SetDrainedRequest, call: Call) -> Message:
        """Drain servers or resume them. Returns before requests in flight have ended."""
        return fleet_to_proto(self._operations.set_drained(request))

    def DeleteFleet(self, request: operator_pb2.DeleteFleetRequest, call: Call) -> Message:
        """Delete a fleet without servers."""
        self._changes.delete(request.fleet.removeprefix("fleets/"))
        return operator_pb2.DeleteFleetResponse()

    def ForgetServer(self, request: operator_pb2.ForgetServerRequest, call: Call) -> Message:
        """Forget a LOST server."""
        self._changes.forget(request.server.removeprefix("servers/"))
        return operator_pb2.ForgetServerResponse()
