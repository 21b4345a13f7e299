"""A rank's model cast to FP8 for each version, with scales that all ranks agree on.

    measure the blocks -> ExchangeMaxima, for blocks that ranks share -> cast -> offer and deliver the cast tensors

The exchange goes through the daemon, which has the ranks' leases: if a rank dies before it has brought its maxima, the version
is aborted for all ranks, and none waits for it any longer. The cast tensors are the same memory for every version. They are
written anew only by the next `publish`, which begins when no server needs the last one's.
"""

import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
from resharder.client.errors import MAXIMA_MISSING, WaitTimeout
from resharder.client.rpc.channel import Channel
from resharder.client.trainer.rank_layout import LiveTensors, RankLayout, rank_layout_of
from resharder.converters.quantization.cast import Floats, QuantisedTensors
from resharder.v1 import publisher_pb2, publisher_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    from resharder.converters.geometry.layout import Layout
    from resharder.converters.models.tensor_io import LookedUp
    from resharder.converters.quantization.scheme import Scheme

logger = logging.getLogger(__name__)
_POLL_SECONDS = 20.0


class QuantisedModel:
    """An attached model whose matrices are cast.

    Attributes:
        layout: Boxes to publish.
        tensors: Local tensors of `layout`.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        layout: "Layout",
        tensors: "LookedUp",
        scheme: "Scheme",
        timeout: float,
        frozen: Collection[str] = (),
    ) -> None:
        """Allocate the cast tensors, half of the memory of the matrices.

        Args:
            channel: Channel to the daemon.
            rank: This rank.
            layout: The rank's layout.
            tensors: Its local tensors.
            scheme: Format to cast to.
            timeout: Seconds to wait for the maxima of other ranks.
            frozen: Tensors of the layout that the rank does not expect to change. Nor do their casts then.
        """
        self._stub, self._channel = publisher_pb2_grpc.PublisherServiceStub(channel.grpc), channel
        self._rank, self._timeout = rank, timeout
        self._scheme, self._frozen = scheme, tuple(frozen)
        self._source, self._cast = LiveTensors(layout, tensors), QuantisedTensors(layout, tensors, scheme)
        self.layout, self.tensors = self._cast.plan.layout, self._cast.tensors
        if recast := self._cast.plan.recast:
            logger.info(
                "%d matrices are FP8 in the trainer in blocks other than the version's, and cast from master weights: %s",
                len(recast),
                ", ".join(recast[:4]),
            )

    @property
    def rank_layout(self) -> RankLayout:
        """Boxes to register, with the blocks that this rank shares."""
        plan, plain = self._cast.plan, rank_layout_of(self.layout)
        scales = (self._scheme.scale_of(name) for name in self._frozen)
        frozen = (*self._frozen, *(name for name in scales if name in plain.tensors))
        return RankLayout(plain.tensors, plain.boxes, plan.contributed.blocks, plan.received.blocks, frozen)

    def check(self) -> None:
        """Find the model's tensors again, as `LiveTensors.check` does."""
        self._source.check()

    def prepare(self, version: resources_pb2.Version) -> None:
        """Cast the model's present values for a version.

        Raises:
            ConversionError: A matrix has an infinity or NaN.
            Conflict: This rank has brought other values for the version before.
            VersionAborted: The version is aborted.
            WaitTimeout: Other ranks have not brought their maxima in time.
        """
        measured, plan = self._cast.measure(), self._cast.plan
        shares = bool(plan.contributed.blocks or plan.received.blocks)
        self._cast.cast(self._exchanged(version, measured) if shares else np.zeros(0, np.float32))

    def free(self) -> None:
        """Free the cast tensors' memory until the next version."""
        self._cast.free()

    def _exchanged(self, version: resources_pb2.Version, measured: Floats) -> Floats:
        end = time.monotonic() + self._timeout
        while True:
            wait = max(0.0, min(_POLL_SECONDS, end - time.monotonic()))
            request = publisher_pb2.ExchangeMaximaRequest(
                version=version.name, epoch=version.epoch, rank=self._rank, maxima=measured, wait_seconds=wait
            )
            try:
                answer = self._channel.call(self._stub.ExchangeMaxima, request, timeout=wait + 30)
                return np.array(answer.maxima, np.float32)
            except WaitTimeout as error:
                if error.reason != MAXIMA_MISSING or time.monotonic() >= end:
                    raise
