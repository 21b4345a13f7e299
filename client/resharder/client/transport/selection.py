"""Choice of the transport for a rank's deliveries."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from resharder.client.errors import UsageError
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.data_port import NO_DATA_PORT, data_port
from resharder.client.transport.at_home import AtHome, PieceSubset
from resharder.client.transport.base import AssignedSlot, Transport
from resharder.client.transport.chunks import GrpcChunks, HttpChunks
from resharder.client.transport.shared_memory import SharedMemory, copy_threads, shares_memory
from resharder.v1 import resources_pb2, server_pb2, server_pb2_grpc

if TYPE_CHECKING:
    import torch
    from resharder.client.transport.gpu_buffers import FromGpu

CHOICES = ("auto", "grpc", "http", "shared-memory")
SHARING = ("auto", "shared-memory")
"""Choices with which ranks write into files of the daemon, or of the node of their host."""

_NEXT_SECONDS = 2.0  # of a query for the next files, for which a delivery may wait


def home_of(version: resources_pb2.Version, slot: AssignedSlot) -> resources_pb2.VersionHome | None:
    """Return a version's files on the node of a rank's host; None if it has none there."""
    return next((each for each in version.homes if each.node == slot.node), None)


class TransportSelector:
    """Transports for one attached model. The transport from a GPU is planned once and reused.

    Args:
        channel: Channel to the daemon.
        choice: One of `CHOICES`.
        device: Returns the device of all attached tensors; None if there are several devices or no tensors.
    """

    def __init__(self, channel: Channel, choice: str, device: "Callable[[], torch.device | None]") -> None:
        self._channel, self._choice, self._device = channel, choice, device
        self._from_gpu: FromGpu | None = None
        self._subsets = {frozen: (PieceSubset(), PieceSubset()) for frozen in (False, True)}

    def select_for(
        self,
        version: resources_pb2.Version,
        slot: AssignedSlot,
        store: resources_pb2.StoreAccess,
        data_address: str,
        *,
        frozen: bool = False,
    ) -> Transport:
        """Return the transport of a slot: into the files of its host's node if the version has them, else as `select`."""
        home = home_of(version, slot)
        divided = slot.divided(gathers=home is not None and home.gathers)
        if home is None or not divided.home_boxes:
            return self.select(store, data_address, frozen=frozen)
        rest = self.select(store, data_address, frozen=frozen) if divided.rest_boxes else None
        memory = SharedMemory(copy_threads()) if frozen else self._from_memory()
        return AtHome(home.folder, divided, memory, rest, self._subsets[frozen])

    def select(self, store: resources_pb2.StoreAccess, data_address: str, *, frozen: bool = False) -> Transport:
        """Return the transport to a daemon: shared memory if possible and permitted, else its data port, else gRPC.

        Args:
            store: The daemon's store.
            data_address: Address of its data port; empty for none.
            frozen: For boxes that are seldom sent: nothing is kept for the next version, of whose files no page is registered.

        Raises UsageError if the choice is `shared-memory` and the store is not visible here.
        """
        if self._choice in SHARING and shares_memory(store):
            return SharedMemory(copy_threads()) if frozen else self._from_memory()
        if self._choice == "shared-memory":
            raise UsageError(
                f"cannot share memory with the daemon at {self._channel.endpoint}: {store.nonce_file} cannot be read here. "
                "Run as its user, with its store at the same path, or leave out transport"
            )
        if self._choice == "grpc":
            return GrpcChunks(self._channel)
        address = data_port(self._channel, data_address)
        return HttpChunks(self._channel, address) if address is not None else GrpcChunks(self._channel, NO_DATA_PORT)

    def stop_preparation(self) -> None:
        """Stop what goes on between versions. A delivery stops it too, but later than servers begin to read the same memory."""
        if self._from_gpu is not None:
            self._from_gpu.stop_preparation()

    def close(self) -> None:
        """Release what transports keep from version to version. No delivery may be under way."""
        if self._from_gpu is not None:
            self._from_gpu.close()

    def _from_memory(self) -> Transport:
        plain, device = partial(SharedMemory, copy_threads()), self._device()
        if device is None or device.type != "cuda":
            return plain()
        if self._from_gpu is None:
            from resharder.client.transport.gpu_buffers import FromGpu

            # With TLS the daemon has security: no process of another identity keeps pages of its files, registered or not.
            next_files = self._next_files if self._channel.tls is None else None
            self._from_gpu = FromGpu(device, copy_threads(most=8), plain, next_files=next_files)
        return self._from_gpu

    def _next_files(self, version: str) -> Path | None:
        """Return the folder of the files that the store has laid out for the version after this one; None if there are none."""
        stub, request = server_pb2_grpc.ServerServiceStub(self._channel.grpc), server_pb2.GetNextFilesRequest(version=version)
        folder = self._channel.call(stub.GetNextFiles, request, timeout=_NEXT_SECONDS, patience=0).folder
        return Path(folder) if folder else None
