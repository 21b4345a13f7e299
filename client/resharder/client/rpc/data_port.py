"""Address of the daemon's data port, as the daemon names it."""

from resharder.client.rpc.channel import Channel
from resharder.converters.wire.endpoint import answering_address
from resharder.converters.wire.range_client import DataAddress

NO_DATA_PORT = "the daemon has no data port: its data_listen is empty"


def data_port(channel: Channel, address: str) -> DataAddress | None:
    """Return the data port at `host:port`, or at the endpoint's host without one, reached as the channel is; None for none."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return None
    host, tls = (host or answering_address(channel.endpoint).rpartition(":")[0]).strip("[]"), channel.tls
    if tls is None:
        return DataAddress(host, int(port))
    return DataAddress(host, int(port), tls.context, tls.name, lambda: dict(tls.metadata()))
