"""One rank's side of a publisher: register what it holds, then deliver its part of version after version.

No rank waits for another but where the daemon says so: registration is complete when every rank has registered, and a version is
READY when every rank has sealed its slot.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from resharder.client import tracing
from resharder.client.errors import (
    TOO_MANY_STAGING,
    UNREGISTERED,
    NotFound,
    OutOfRoom,
    ResharderError,
    StaleParameters,
    UsageError,
    VersionAborted,
    WaitTimeout,
)
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Backoff, Channel, bound
from resharder.client.trainer.attempts import Attempts
from resharder.client.trainer.colocate import Fleet, Generation, Part
from resharder.client.trainer.handle import Handle, State
from resharder.client.trainer.identity import Identity
from resharder.client.trainer.lease import Lease
from resharder.client.trainer.model_files import Config, Tokenizer, config_file, plain_config, tokenizer_files
from resharder.client.trainer.rank_layout import (
    DeclaredTensor,
    LiveTensors,
    RankLayout,
    TensorItem,
    assigned_items,
    declare,
    declared_rank_layout,
    rank_layout_of,
)
from resharder.client.trainer.registration import Registration, register
from resharder.client.trainer.rendezvous import meet
from resharder.client.trainer.saved_state import eval_mode, keep_rng
from resharder.client.transport.base import Slot, Transport
from resharder.client.transport.grpc_chunks import GrpcChunks
from resharder.client.transport.host_buffers import digests_of
from resharder.client.transport.shared_memory import SharedMemory, copy_threads, shares_memory
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import ConversionError
from resharder.converters.geometry.layout import ITEM_SIZES
from resharder.converters.storage.digest import compile_for
from resharder.v1 import operator_pb2, operator_pb2_grpc, publisher_pb2, publisher_pb2_grpc, resources_pb2

if TYPE_CHECKING:
    import torch
    from resharder.client.direct.sender import Sender
    from resharder.client.trainer.offload import Aside
    from resharder.client.transport.base import Item
    from resharder.converters.geometry.layout import Layout
    from resharder.converters.models.hf_names import Model, Rename

_RESTARTS = 3


class Publisher:
    """Made by `connect`. A context manager; one thread at a time publishes."""

    def __init__(
        self,
        channel: Channel,
        model: str,
        identity: Identity,
        *,
        transport: str,
        max_ahead: int | None,
        staging_timeout: float,
        register_timeout: float,
        direct_wait: float = 0.0,
    ) -> None:
        if max_ahead is not None and max_ahead < 1:
            raise UsageError(f"expected max_ahead of at least 1 or None, got {max_ahead}")
        if transport not in ("auto", "grpc", "shared-memory"):
            raise UsageError(f"expected transport auto, grpc or shared-memory, got {transport!r}")
        self.model, self.identity = model, identity
        self._channel = channel
        self._stub = publisher_pb2_grpc.PublisherServiceStub(channel.grpc)
        self._transport_name, self._max_ahead = transport, max_ahead
        self._staging_timeout, self._register_timeout = staging_timeout, register_timeout
        self._direct_wait = direct_wait
        self._sender: Sender | None = None
        self._files: list[resources_pb2.ModelFile] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._rank_layout: RankLayout | None = None
        self._registration: Registration | None = None
        self._live: LiveTensors | None = None
        self._from_gpu: Transport | None = None
        self._chunks: Sequence[torch.nn.Module] = ()
        self._model: Model | None = None
        self._aside: Aside | None = None
        self._sharing = threading.Lock()
        self._ahead: deque[Handle] = deque()
        self._newest: Handle | None = None
        self._attempts = Attempts()
        self._timings: tracing.Timings = []  # of the publish that goes on
        self._lost = ""  # the newest version's name, if a daemon took it with it
        self._lease: Lease | None = None
        self._process, self._lock = os.getpid(), threading.RLock()

    @property
    def epoch(self) -> int:
        """Of this job's claim on the model; 0 before something is attached."""
        return self._registration.epoch if self._registration else 0

    def attach(
        self,
        model: "Model",
        hf_config: Config,
        tokenizer: Tokenizer | None = None,
        *,
        rename: "Rename | None" = None,
        ranks: Sequence[int] | None = None,
        check_replicas: bool = False,
        wait: bool = True,
    ) -> None:
        """Registers what this rank holds of a model: Megatron's chunks, or a module (its parts, a state dict) of DTensors and
        plain tensors with HF names, wrapped or not.

        `hf_config`: a transformers config or the content of config.json. `tokenizer`: an object with `save_pretrained`, or a
        folder. For DTensors: `rename` from names in memory to names on disk, `ranks` that hold the whole of `model` between
        them where not all do (a pipeline stage's). `check_replicas`: first compare what all ranks hold of the same elements (a
        collective of torch's default group). Waits for all ranks unless `wait` is False. Raises ConversionError for a model that
        is not understood (FP8 parameters, an unknown family) and, as ReplicasDiffer, for replicas that differ; LayoutRejected,
        OutOfRoom, StaleEpoch, UsageError.
        """
        from resharder.converters.models import local_layout, megatron_chunks

        with self._alone():
            self.attach_config(hf_config, tokenizer)
            layout, tensors = local_layout(model, plain_config(hf_config), rename=rename, ranks=ranks)
            if check_replicas:
                self._check_replicas(layout, tensors)
            self._live, self._from_gpu = LiveTensors(layout, tensors), None
            self._model, self._chunks = model, megatron_chunks(model)
            self._open_sender(layout, tensors)
            self._register(rank_layout_of(layout), wait)

    def attach_config(self, hf_config: Config, tokenizer: Tokenizer | None = None) -> None:
        """The files that the model's versions carry, for a trainer that publishes tensors."""
        self._files = [config_file(hf_config), *tokenizer_files(tokenizer)]
        self._shapes = _known_shapes(hf_config)

    def attach_tensors(self, declared: Iterable[DeclaredTensor], *, wait: bool = True) -> None:
        """Registers what this rank will give to `publish_tensors`: (name, dtype, shape of the whole tensor[, index]).

        Raises LayoutRejected, OutOfRoom, StaleEpoch, UsageError.
        """
        with self._alone():
            self._live, self._model, self._chunks = None, None, ()
            self._close_sender()
            self._register(declared_rank_layout(declared), wait)

    def publish(self, step: int, *, sync: bool = False, direct: bool = True) -> Handle:
        """Hands this rank's part of the attached model over; returns when the trainer may change its weights.

        `sync`: gather parameters first that `overlap_param_gather` left stale (a collective). `direct`: False where servers are
        to take this version from the daemon, though `connect` was given a `direct_wait`; alike on all ranks.

        Raises StaleParameters where `sync` is False and some are stale, StaleEpoch, Conflict, VersionAborted, OutOfRoom,
        WaitTimeout, DaemonUnreachable; the version is aborted then.
        """
        with self._alone():
            live = self._live
            if live is None:
                raise UsageError("expected an attached model: call attach(model_chunks, hf_config) before publish")
            self._refuse_stale(sync)
            return self._publish(step, live.items, direct=direct)

    def publish_tensors(self, step: int, items: Iterable[TensorItem] | Callable[[], Iterable[TensorItem]]) -> Handle:
        """Hands over HF tensors that the trainer has made itself: (hf_name, tensor) or (hf_name, index, part), spread over
        the ranks in any way, in any order, each element on one rank. A tensor may be reused as soon as the next one is asked for.

        Without `attach_tensors` before, the first call registers what comes; it reads `items` twice, so those of a plain iterator
        are kept until it returns. Raises as `publish`.
        """
        with self._alone():
            if self._live is not None:
                raise UsageError("expected publish(step): a model is attached")
            once = not callable(items) and iter(items) is items
            if self._rank_layout is None:
                items = list(items) if once and not callable(items) else items
                once = False
                self._register(declared_rank_layout(declare(_opened(items), self._shapes)), wait=True)
            rank_layout = self._rank_layout
            if rank_layout is None:
                raise UsageError("expected registered tensors")
            return self._publish(step, lambda positions: assigned_items(rank_layout, positions, _opened(items)), once=once)

    @contextmanager
    def generation(
        self,
        step: int,
        *,
        fleet: str = "",
        level: int = 2,
        offload: bool = False,
        timeout: float | None = 600.0,
        publish: bool = True,
    ) -> Iterator[Generation]:
        """Gives the GPUs to the servers that share them, for as long as the block lasts; every rank enters and leaves.

        At entry: `publish(step)` unless it is published (`publish=False`: nothing is); models in eval mode; with `offload`
        parameters, gradients and buffers in host memory; every live server of `fleet` (the model's default one) awake, with
        this version or a newer one. At exit, however the block ends: servers asleep at `level`, memory back, and every
        module's train mode and all RNG states as they were. `timeout`: seconds for each wait but that for other ranks to leave;
        None: no bound.

        Raises as `publish`, WaitTimeout, which names the servers that lag, GenerationEnded, where another rank failed, and
        UsageError; at exit ServersNotAsleep: what is aside stays there until `bring_back`.
        """
        from resharder.client.trainer.offload import roots_of, set_aside

        if not self._sharing.acquire(blocking=False):
            raise UsageError("expected the end of this publisher's generation before another one")
        model = self._model
        roots = roots_of(model) if model is not None else []

        def wanted() -> Handle | None:
            with self._alone():
                if offload and model is None:
                    raise UsageError("expected an attached model to move aside: call attach, or move your own tensors")
                return self._published(step) if publish else self._newest

        def aside() -> None:
            self._aside = set_aside(model) if offload and model is not None else None

        try:
            with Operator(self._channel.endpoint, connect_timeout=self._channel.patience, tls=self._channel.tls) as operator:
                part = Part(
                    meet(self.identity, self.model),
                    Fleet(operator, fleet or self.model),
                    level=level,
                    timeout=bound(timeout),
                    set_aside=aside,
                    bring_back=self.bring_back,
                )
                with part.held(wanted, (keep_rng, partial(eval_mode, roots))) as generation:
                    self._ahead.clear()
                    yield generation
        finally:
            self._sharing.release()

    def bring_back(self) -> None:
        """What a generation has left aside, after ServersNotAsleep or an interrupt. The servers must be asleep or gone."""
        if self._aside is not None:
            self._aside.bring_back()
            self._aside = None

    def abort(self, reason: str = "the trainer asked for it") -> None:
        """Gives up the newest version that this rank has published, unless it is READY."""
        if self._newest is not None:
            self._abort(self._newest.name, reason)

    def close(self) -> None:
        """Ends the lease's renewal and the channel. Versions that every rank has sealed are not touched."""
        if self._lease is not None:
            self._lease.stop()
        self._close_sender()
        self._channel.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if os.getpid() != self._process:
            raise UsageError("expected the process that called connect, this one was forked from it: connect here")
        with self._lock:
            if self._lease is not None and self._lease.lost is not None:
                raise self._lease.lost
            if self._aside is not None:
                raise UsageError(
                    "expected parameters in their place, a generation has moved them aside: leave it, or bring_back()"
                )
            yield

    def _published(self, step: int) -> Handle:
        """The newest version, if it is of this step, else a new one."""
        newest = self._newest
        if newest is not None and newest.step == step and newest.is_coming():
            return newest
        if self._live is None:
            raise UsageError(f"expected publish_tensors({step}, …) before generation({step}), or an attached model")
        return self.publish(step)

    def _open_sender(self, layout: "Layout", tensors: "Mapping[str, torch.Tensor]") -> None:
        self._close_sender()
        if self._direct_wait > 0:
            from resharder.client.direct.sender import Sender

            self._sender = Sender(self._channel, self.identity.rank, layout, tensors)

    def _close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = None

    def _register(self, rank_layout: RankLayout, wait: bool) -> None:
        if not self._files:
            raise UsageError("expected the model's config: pass config to connect, or call attach_config first")
        self._rank_layout = rank_layout
        self._registration = register(self._channel, self.model, self._files, self.identity, rank_layout)
        self._attempts.registered(self._registration.newest_version)
        if self._lease is not None:
            self._lease.stop()
        self._lease = Lease(self._channel, self._registration, self.identity.rank, self._again_if_idle, self._give_up_lost)
        if self._sender is not None:
            self._sender.declare(self._registration.name)
        compile_for(ITEM_SIZES[spec.dtype] for spec in rank_layout.tensors.values())  # while others register, not in a publish
        if wait:
            self._registration.assignment(self._register_timeout)

    def _again(self) -> None:
        """Registers as before with a daemon that has lost this publisher: it was started anew."""
        if self._rank_layout is None:
            raise UsageError("expected something attached")
        self._registration = register(self._channel, self.model, self._files, self.identity, self._rank_layout)
        if self._lease is not None:
            self._lease.follow(self._registration)
        if self._newest is not None:
            with suppress(ResharderError):
                self._lost = self._newest.name if self._newest.is_gone() else ""

    def _again_if_idle(self) -> None:
        """For the lease's thread. A publish in progress finds out by itself, and must not cost the lease."""
        if self._lock.acquire(blocking=False):
            try:
                self._again()
            finally:
                self._lock.release()

    def _give_up_lost(self) -> None:
        """What this rank delivered to a daemon that is gone will not come again: other ranks must not wait for it."""
        newest, registration, rank = self._newest, self._registration, self.identity.rank
        if newest is None or registration is None or newest.name != self._lost:
            return
        request = operator_pb2.ListVersionsRequest(model=self.model, page_size=500)
        stub = operator_pb2_grpc.OperatorServiceStub(self._channel.grpc)
        for version in self._channel.call(stub.ListVersions, request).versions:
            same = (version.epoch, version.step) == (registration.epoch, newest.step)
            if same and not _delivered(version, rank):
                self._abort(version.name, f"rank {rank} delivered step {newest.step} to a daemon that is gone")

    def _check_replicas(self, layout: "Layout", tensors: "Mapping[str, torch.Tensor]") -> None:
        import torch.distributed as dist
        from resharder.converters.models.replicas import check_replicas

        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != self.identity.world_size:
            raise UsageError(
                f"expected torch.distributed over all {self.identity.world_size} ranks to compare them, found {ranks}"
            )
        check_replicas(layout, tensors)

    def _refuse_stale(self, sync: bool) -> None:
        if not self._chunks:
            return
        from resharder.converters.models.megatron.layout import gather_parameters, stale_parameters

        stale = stale_parameters(self._chunks)
        if stale and sync:
            gather_parameters(self._chunks)
        elif stale:
            raise StaleParameters(
                f"{len(stale)} parameters are older than other ranks' ({', '.join(stale[:4])}{', …' if len(stale) > 4 else ''}): "
                "overlap_param_gather gathers them in the next forward pass; call start_param_sync(force_sync=True) on every "
                "model chunk of every rank before publish, or publish(step, sync=True)"
            )

    def _publish(
        self, step: int, read: "Callable[[Sequence[int]], Iterable[Item]]", *, once: bool = False, direct: bool = False
    ) -> Handle:
        self._timings.clear()
        self._give_up_lost()
        if self._newest is not None and self._newest.step == step:
            self._lost = ""  # it does come again
        self._wait_for_servers()
        handle = self._deliver_again(step, read, 0 if once else _RESTARTS, direct)
        self._newest = handle
        if self._max_ahead is not None:
            self._ahead.append(handle)
        return handle

    def _deliver_again(self, step: int, read: "Callable[[Sequence[int]], Iterable[Item]]", restarts: int, direct: bool) -> Handle:
        slot, positions, version = self._begin(step, _RESTARTS, direct)
        try:
            with self._offered(version, direct):
                return self._deliver(slot, positions, version, read)
        except NotFound:
            if not restarts:
                raise
        # The daemon was started anew, and what was STAGING is gone with the old one.
        self._timings.clear()
        return self._deliver_again(step, read, restarts - 1, direct)

    @contextmanager
    def _offered(self, version: resources_pb2.Version, direct: bool) -> Iterator[None]:
        """Servers may take the version from this rank's memory while it is delivered, and until none is expected to any more."""
        if not direct or self._sender is None or self._registration is None or version.state == State.ABORTED:
            yield
            return
        offering = self._sender.offer(self._registration.name, version.name, self._direct_wait)
        try:
            yield
            offering.wait(self._staging_timeout + self._direct_wait)
        except BaseException:
            offering.give_up()
            raise

    def _begin(self, step: int, restarts: int, direct: bool) -> tuple[Slot, Sequence[int], resources_pb2.Version]:
        """What this rank sends, and the version to send it to. Registers again with a daemon that was started anew."""
        registration = self._registration
        if registration is None:
            raise UsageError("expected something attached")
        try:
            with tracing.timed(self._timings, "create"):
                slot, positions = registration.assignment(self._register_timeout)
                return slot, positions, self._create_version(registration, step, direct)
        except (NotFound, WaitTimeout) as error:
            if error.reason not in UNREGISTERED or not restarts:
                raise
        self._again()
        return self._begin(step, restarts - 1, direct)

    def _deliver(
        self,
        slot: Slot,
        positions: Sequence[int],
        version: resources_pb2.Version,
        read: "Callable[[Sequence[int]], Iterable[Item]]",
    ) -> Handle:
        if version.state == State.ABORTED:
            raise VersionAborted(f"{version.name} (step {version.step}) was aborted: {version.reason}")
        tracing.link(version.trace)
        if not slot.boxes:
            return Handle(self._channel, version)
        try:
            transport = None if _delivered(version, slot.rank) else self._transport()
            with tracing.timed(self._timings, "deliver"):
                items = read(positions)
                digests = digests_of(slot, items) if transport is None else transport.deliver(version, slot, items)
            request = publisher_pb2.SealSlotRequest(
                version=version.name,
                epoch=version.epoch,
                rank=slot.rank,
                digests=digests,
                mapped=transport is not None and transport.mapped,
                timings=self._timings,
            )
            self._channel.call(partial(self._stub.SealSlot, metadata=tracing.metadata()), request, timeout=300)
        except BaseException as error:
            if not _delivered(version, slot.rank):
                self._abort(version.name, f"rank {slot.rank}: {type(error).__name__}: {error}"[:500])
            raise
        return Handle(self._channel, version)

    def _transport(self) -> Transport:
        store = self._registration.store if self._registration else resources_pb2.StoreAccess()
        if self._transport_name != "grpc" and shares_memory(store):
            return self._from_memory()
        if self._transport_name == "shared-memory":
            raise UsageError(
                f"expected to share memory with the daemon at {self._channel.endpoint}, cannot read {store.nonce_file}"
            )
        return GrpcChunks(self._channel)

    def _from_memory(self) -> Transport:
        plain, device = partial(SharedMemory, copy_threads()), self._live.device if self._live else None
        if device is None or device.type != "cuda":
            return plain()
        if self._from_gpu is None:
            from resharder.client.transport.gpu_buffers import FromGpu

            self._from_gpu = FromGpu(device, copy_threads(most=8), plain)
        return self._from_gpu

    def _create_version(self, registration: Registration, step: int, direct: bool) -> resources_pb2.Version:
        withheld = not direct or self._sender is None
        request = publisher_pb2.CreateVersionRequest(
            publisher=registration.name,
            rank=self.identity.rank,
            step=step,
            withheld=withheld,
            after=self._attempts.after(step),
        )
        backoff = Backoff(self._staging_timeout, longest=1.0)
        while True:
            try:
                version: resources_pb2.Version = self._channel.call(self._stub.CreateVersion, request)
                self._attempts.begun(step, version.number)
                return version
            except OutOfRoom as error:
                if error.reason != TOO_MANY_STAGING or not backoff.wait():
                    raise

    def _wait_for_servers(self) -> None:
        """Holds the trainer back until less than `max_ahead` of its versions are not served yet."""
        while self._max_ahead is not None and len(self._ahead) >= self._max_ahead:
            with tracing.timed(self._timings, "wait"), suppress(VersionAborted, NotFound):
                self._ahead[0].wait_serving(self._staging_timeout)
            self._ahead.popleft()

    def _abort(self, name: str, reason: str) -> None:
        request = publisher_pb2.AbortVersionRequest(version=name, epoch=self.epoch, reason=reason)
        # The error that led here is the one to raise; without this call the daemon aborts when the lease ends.
        with suppress(ResharderError):
            self._channel.call(self._stub.AbortVersion, request, timeout=5, patience=0)


def _delivered(version: resources_pb2.Version, rank: int) -> bool:
    """Whether the daemon has this rank's part already, and only a comparison is left."""
    sealed = any(slot.rank == rank and slot.state == resources_pb2.Slot.SEALED for slot in version.slots)
    return bool(version.state != State.STAGING or sealed)


def _opened(items: Iterable[TensorItem] | Callable[[], Iterable[TensorItem]]) -> Iterable[TensorItem]:
    return items() if callable(items) else items


def _known_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Of whole tensors, where the family has a table."""
    with suppress(ConversionError):
        return expected_shapes(plain_config(config))
    return {}
