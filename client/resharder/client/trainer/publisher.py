"""One rank's side of a publisher: registration of the rank's layout, then delivery of its part of version after version.

Ranks wait for one another only through the daemon. Registration is complete when every rank has registered, and a version is
READY when every rank has sealed its slot.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from resharder.client import tracing
from resharder.client.errors import NotFound, StaleParameters, UsageError, VersionAborted
from resharder.client.operator import Operator
from resharder.client.rpc.channel import Channel, bound
from resharder.client.trainer.delivery import Delivery, Then, Wake, sender_of, transfer_copy
from resharder.client.trainer.generation import Generation, GenerationPart, SharedFleet, lent_model, meet
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.identity import RankIdentity
from resharder.client.trainer.model_files import (
    Config,
    Tokenizer,
    adapter_config,
    adapter_files,
    known_shapes,
    model_files,
    plain_config,
    refuse_ids_in_padding,
)
from resharder.client.trainer.rank_layout import (
    DeclaredTensor,
    LiveTensors,
    RankLayout,
    assigned_items,
    declare,
    declared_rank_layout,
    opened,
    rank_layout_of,
    split_item,
    step_number,
)
from resharder.client.trainer.session import PublisherSession
from resharder.client.transport.selection import CHOICES, SHARING, TransportSelector
from resharder.converters.allowances import collecting
from resharder.converters.architectures.wrapped import language_config
from resharder.converters.geometry.layout import ITEM_SIZES
from resharder.converters.storage.digest import compile_for
from resharder.v1 import resources_pb2

if TYPE_CHECKING:
    import torch
    from resharder.client.direct.sender import Sender
    from resharder.client.trainer.delivery import Read
    from resharder.client.trainer.offload import OffloadedMemory
    from resharder.client.trainer.quantised import QuantisedModel
    from resharder.client.trainer.rank_layout import TensorItem
    from resharder.client.transport.base import Item
    from resharder.converters.geometry.layout import Layout
    from resharder.converters.models.hf_names import Model, Rename
    from resharder.converters.models.tensor_io import LookedUp
    from resharder.converters.quantization.scheme import Scheme

DELIVERY, TRANSFER = "delivery", "transfer"
RELEASES = (DELIVERY, TRANSFER)
"""Values of `release`: `publish` returns when the store has the bytes, or when the SDK has a copy of its own."""
_ONE_BY_ONE = "also=… needs attach(model, …): tensors that are given one by one are published as one model"


class Publisher:
    """One rank's publisher of a model, created by `connect`. It is a context manager. One thread at a time may publish."""

    def __init__(
        self,
        channel: Channel,
        model: str,
        identity: RankIdentity,
        *,
        transport: str,
        max_ahead: int | None,
        staging_timeout: float,
        register_timeout: float,
        direct_wait: float | None = None,
        scheme: "Scheme | None" = None,
        base: str = "",
        release: str = DELIVERY,
    ) -> None:
        if release not in RELEASES:
            raise UsageError(f"expected release delivery or transfer, got {release!r}")
        self._release = release
        self._backpressure = Backpressure(max_ahead, staging_timeout)
        if transport not in CHOICES:
            raise UsageError(f"expected transport auto, grpc, http or shared-memory, got {transport!r}")
        self.model, self.base, self.identity = model, base, identity
        self._channel, self._transport, self._scheme = channel, transport, scheme
        self._staging_timeout, self._direct_wait = staging_timeout, direct_wait
        shares = transport in SHARING
        self._session = PublisherSession(channel, model, identity, register_timeout, shares=shares, base=base)
        self._files: list[resources_pb2.ModelFile] = []
        self._file_warnings: list[str] = []  # allowed refusals of `attach_config`
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._live: LiveTensors | None = None
        self._quantised: QuantisedModel | None = None
        self._chunks: Sequence[torch.nn.Module] = ()
        self._model: Model | None = None
        self._offloaded: OffloadedMemory | None = None
        self._delivery = self._delivery_of(None)
        self._sharing = threading.Lock()
        self._by_model: dict[str, Publisher] = {model: self}  # of the models that the same calls publish

    @property
    def epoch(self) -> int:
        """Epoch of this job's claim to the model; 0 before something is attached."""
        return self._session.epoch

    def attach(
        self,
        model: "Model",
        hf_config: Config,
        tokenizer: Tokenizer | None = None,
        *,
        rename: "Rename | None" = None,
        ranks: Sequence[int] | None = None,
        check_replicas: bool = False,
        adapter: str | None = None,
        frozen: str | Path | None = None,
        wait: bool = True,
    ) -> None:
        """Register this rank's layout of a model, and wait for the other ranks unless `wait` is False.

        Of a publisher with a `base`, the layout is that of the model's LoRA adapter alone: PEFT's in any of these forms of a
        model, or a state dict of an adapter with PEFT's names.

        Args:
            model: Megatron's chunks; or a module with HF names, its parts or a state dict, of DTensors and plain tensors,
                wrapped or not. Each publish looks the tensors up by name again. Those of a state dict are published as they are:
                copies keep their values until others are put into it.
            hf_config: transformers config or content of config.json; with a state dict of an adapter, PEFT's LoraConfig or the
                content of adapter_config.json.
            tokenizer: Object with `save_pretrained`, or a folder.
            rename: For DTensors, a function from names in memory to names on disk.
            ranks: For DTensors, the ranks that together have the whole of `model`, such as those of a pipeline stage; None for
                all.
            check_replicas: Compare all ranks' replicas first, a collective of torch's default process group.
            adapter: Name of the adapter, for a model that has several.
            frozen: Checkpoint whose tower is published with a language model that is trained without one, under the config of
                both: a folder, or `resharder://HOST:PORT/models/MODEL/versions/NUMBER`. Rank 0 reads it, once.
            wait: Wait for all ranks to register.

        Raises:
            ConversionError: The model is not supported (most FP8 parameters, an unknown or uncast family), or replicas differ.
            LayoutRejected: The ranks' layouts do not tile the model.
            OutOfRoom: The store lacks capacity for the model.
            StaleEpoch: A newer job has taken over the model.
            UsageError: An argument is wrong.
        """
        from resharder.client.trainer.frozen import frozen_tensors
        from resharder.converters.models import megatron_chunks

        with self._alone(), collecting() as warnings:
            if self.base and frozen is not None:
                raise UsageError("frozen is for models, and an adapter has no tower: leave frozen out")
            if self.base:
                layout, tensors = self._adapter_layout(model, hf_config, tokenizer, adapter, rename=rename, ranks=ranks)
            elif adapter is not None:
                raise UsageError(f"adapter={adapter!r} needs the name of its base: connect(…, base=…)")
            else:
                layout, tensors = self._model_layout(model, hf_config, tokenizer, rename=rename, ranks=ranks, frozen=frozen)
            if check_replicas:
                LiveTensors(layout, tensors).check()
                compare_replicas(layout, tensors, self.identity.world_size)
            rank_layout = rank_layout_of(layout, frozen_tensors(model, tensors) if not self.base else ())
            if self._scheme is not None:
                from resharder.client.trainer.quantised import QuantisedModel

                rank, seconds = self.identity.rank, self._staging_timeout
                given = rank, layout, tensors, self._scheme, seconds
                self._quantised = made = QuantisedModel(self._channel, *given, rank_layout.frozen)
                layout, tensors, rank_layout = made.layout, made.tensors, made.rank_layout
            self._live = LiveTensors(layout, tensors)
            self._model, self._chunks = model, megatron_chunks(model)
            self._delivery.close()
            self._delivery = self._delivery_of(
                self._live,
                sender_of(self._channel, self.identity.rank, layout, tensors, self._direct_wait, rank_layout.frozen),
            )
            self._register(rank_layout, wait, warnings)

    def _model_layout(
        self,
        model: "Model",
        hf_config: Config,
        tokenizer: Tokenizer | None,
        *,
        rename: "Rename | None",
        ranks: Sequence[int] | None,
        frozen: str | Path | None,
    ) -> "tuple[Layout, LookedUp]":
        from resharder.client.trainer.frozen import refuse_without_tower, with_tower
        from resharder.converters.models import local_layout, vocabulary_rows

        self._set_files(hf_config, tokenizer, model)
        config = plain_config(hf_config)
        if frozen is not None:
            refuse_without_tower(config)
        found = local_layout(model, config, rename=rename, ranks=ranks, fp8=bool(self._scheme), tower=frozen is None)
        rows = language_config(config).get("vocab_size", 0)
        refuse_ids_in_padding(tokenizer, self._files, rows, vocabulary_rows(model))
        if frozen is not None and self.identity.rank == 0:
            return with_tower(*found, config, frozen)
        return found

    def _adapter_layout(
        self,
        model: "Model",
        hf_config: Config,
        tokenizer: Tokenizer | None,
        adapter: str | None,
        *,
        rename: "Rename | None",
        ranks: Sequence[int] | None,
    ) -> "tuple[Layout, LookedUp]":
        from resharder.converters.models.adapters import find_adapter

        found = find_adapter(model, hf_config, adapter)
        self._set_files(found.config, tokenizer)
        return found.layout(adapter_config(found.config), rename=rename, ranks=ranks)

    def attach_config(self, hf_config: Config, tokenizer: Tokenizer | None = None) -> None:
        """Set the model's files, for a trainer that publishes tensors.

        Args:
            hf_config: transformers config or content of config.json; of an adapter PEFT's LoraConfig or the content of
                adapter_config.json.
            tokenizer: Object with `save_pretrained`, or a folder.

        Raises:
            UsageError: The config lacks `architectures`, or there are no tokenizer files.
        """
        self._set_files(hf_config, tokenizer)

    def attach_tensors(self, declared: Iterable[DeclaredTensor], *, wait: bool = True) -> None:
        """Register the tensors that this rank will pass to `publish_tensors`.

        Args:
            declared: (name, dtype, shape of the whole tensor[, index]) for each.
            wait: Wait for all ranks to register.

        Raises:
            LayoutRejected: The ranks' tensors do not tile the model.
            OutOfRoom: The store lacks capacity for the model.
            StaleEpoch: A newer job has taken over the model.
            UsageError: A declaration is invalid, or there is no config.
        """
        with self._alone():
            self._live, self._quantised, self._model, self._chunks = None, None, None, ()
            self._delivery.close()
            self._delivery = self._delivery_of(None)
            self._register(declared_rank_layout(declared), wait)

    def publish(self, step: int, *, sync: bool = False, direct: bool = True, base_version: int | None = None) -> Handle:
        """Deliver this rank's part of the attached model. The weights may change when it returns.

        With `release="transfer"`, the upload goes on from a copy. If it fails, the version is ABORTED, and the next `publish`
        raises the error, once, before it begins.

        Reads tensors on the current stream, after its pending work.

        Args:
            step: Label of the version; a step is a version within the job.
            sync: Gather parameters that `overlap_param_gather` left stale, a collective.
            direct: False makes servers take this version from the daemon, whatever `direct_wait` is; the same on all ranks.
            base_version: Version of the base that an adapter was trained on, the same on all ranks. Servers load the adapter
                beside this version. None does not say it.

        Returns:
            A handle of the version.

        Raises:
            StaleParameters: Parameters are stale and `sync` is False.
            UsageError: No model is attached; or a tensor has another form or placement than at `attach`, or no memory.
            StaleEpoch, Conflict, VersionAborted, OutOfRoom, WaitTimeout, DaemonUnreachable: The version is aborted.
        """
        on = self._base_version(base_version)
        return self._publish_attached(step_number(step), sync=sync, direct=direct, base_version=on)

    def publish_tensors(
        self,
        step: int,
        items: "Iterable[TensorItem] | Callable[[], Iterable[TensorItem]]",
        *,
        base_version: int | None = None,
    ) -> Handle:
        """Deliver HF tensors, divided over the ranks in any way and order, with each element on one rank.

        A tensor may be reused when the next item is requested. Without `attach_tensors`, the first call registers the items and
        reads them twice, so those of a plain iterator stay in memory until it returns.

        Args:
            step: Label of the version.
            items: (hf_name, tensor) or (hf_name, index, part) for each, or a function that returns them. Those of an adapter have
                PEFT's names, `base_model.model.….lora_A.weight`.
            base_version: As in `publish`.

        Returns:
            A handle of the version.

        Raises:
            ResharderError: As in `publish`.
        """
        step, on = step_number(step), self._base_version(base_version)
        if isinstance(items, Sequence):  # before anything is sent
            for item in items:
                split_item(item)
        with self._alone():
            if self._live is not None:
                raise UsageError("a model is attached: call publish(step) instead")
            once = not callable(items) and iter(items) is items
            if self._session.rank_layout is None:
                items = list(items) if once and not callable(items) else items
                once = False
                self._register(declared_rank_layout(declare(opened(items), self._shapes)), wait=True)
            rank_layout = self._session.rank_layout
            if rank_layout is None:
                raise UsageError("the tensors are not registered: publish them again")

            def read(positions: Sequence[int]) -> "Iterator[Item]":
                return assigned_items(rank_layout, positions, opened(items))

            return self._publish(step, read, once=once, base_version=on)

    @contextmanager
    def generation(
        self,
        step: int,
        *,
        fleet: str = "",
        level: int = 2,
        offload: bool = False,
        direct: bool = False,
        timeout: float | None = 600.0,
        publish: bool = True,
        base_version: int | None = None,
    ) -> Iterator[Generation]:
        """Lend the GPUs to the servers that share them while the block runs. Every rank must enter and leave.

        At entry: `publish(step)`, unless it is published; models in eval mode; with `offload`, parameters, gradients and
        buffers in host memory; every live server of `fleet` awake, with this version or a newer one. With `direct`, the servers'
        weights wake first and are installed from the ranks' memory, before it is offloaded. At exit, however the block ends:
        servers asleep at `level`, memory restored, and every module's train mode and all RNG states as before.

        Args:
            step: Label of the version.
            fleet: Name of the fleet; by default the model's. It may follow a model of `also`, whose version it then takes.
            level: Sleep level of the servers, 1 or 2.
            offload: Free the model's GPU memory.
            direct: Install over the direct path. The GPUs need memory for the servers' weights beside the trainer's.
            timeout: Bound in seconds on each wait, except that for other ranks to leave; None is no bound.
            publish: False publishes nothing.
            base_version: As in `publish`.

        Returns:
            A context of the generation.

        Raises:
            WaitTimeout: Servers lag; the message names them.
            GenerationEnded: Another rank has failed.
            ServersNotAsleep: At exit; memory stays offloaded until `bring_back`.
            UsageError: Another generation is in progress, `direct` without `direct_wait`, or the fleet follows another model.
            ResharderError: As in `publish`.
        """
        from resharder.client.trainer.offload import keeping, offload_memory

        step, on = step_number(step), self._base_version(base_version)
        if not self._sharing.acquire(blocking=False):
            raise UsageError("the previous generation of this publisher has not ended: leave it first")
        model, lent = self._model, ""

        def wanted(wake: Wake | None) -> Handle | None:
            nonlocal lent
            with self._alone():
                if direct and not (publish and self._delivery.offers_to_all):
                    raise UsageError("direct=True needs an attached model, publish=True and connect(direct_wait=…)")
                if offload and model is None:
                    raise UsageError("there is no attached model to offload: call attach, or offload your own tensors")
                lent = lent_model(shared, tuple(self._by_model), publish=publish)
                if publish:
                    self._ensure_published(step, {} if wake is None else {lent: wake}, on)
                return self._by_model[lent]._session.newest if lent else None

        def offload_model() -> None:
            self.release()
            self._offloaded = offload_memory(model) if offload and model is not None else None

        try:
            with Operator(self._channel.endpoint, connect_timeout=self._channel.patience, tls=self._channel.tls) as operator:
                shared = SharedFleet(operator, fleet or self.model)
                ranks, seconds = meet(self.identity, self.model), bound(timeout)
                part = GenerationPart(
                    ranks, shared, level=level, timeout=seconds, offload=offload_model, bring_back=self.bring_back, direct=direct
                )
                with part.held(wanted, keeping(model)) as generation:
                    self._by_model.get(lent, self)._backpressure.clear()
                    yield generation
        finally:
            self._sharing.release()

    def bring_back(self) -> None:
        """Restore the memory that a generation has left offloaded, after ServersNotAsleep or an interrupt.

        The servers must be asleep or gone.
        """
        if self._offloaded is not None:
            self._offloaded.bring_back()
            self._offloaded = None

    def release(self) -> None:
        """Have servers of this host unmap the model's memory, and free cast tensors. The next `publish` shares it again.

        Call it before memory is freed by other means than `generation(offload=True)`: the driver frees nothing that another
        process has mapped.
        """
        self._delivery.release()
        if self._quantised is not None:
            self._quantised.free()

    def abort(self, reason: str = "the trainer asked for it") -> None:
        """Abort the newest version that this rank has published, unless it is READY.

        Args:
            reason: Reason for the version's state.
        """
        if (newest := self._session.newest) is not None:
            self._delivery.expect_abort()
            self._session.abort(newest.name, reason)

    def close(self) -> None:
        """Stop renewing the lease and close the channel. Versions that every rank has sealed remain.

        With `release="transfer"`, waits for the upload in progress, `staging_timeout` at most.
        """
        self._delivery.close()
        self._session.close()
        self._channel.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._session.exclusive():
            self._channel.check_open()
            if self._offloaded is not None:
                raise UsageError("a generation has moved the parameters out of GPU memory: leave it, or call bring_back()")
            yield

    def _set_files(self, hf_config: Config, tokenizer: Tokenizer | None, model: "Model | None" = None) -> None:
        with collecting() as self._file_warnings:
            if self.base:
                self._files, self._shapes = adapter_files(hf_config, tokenizer), {}
                return
            self._files = model_files(hf_config, tokenizer, self._scheme, model)
            self._shapes = known_shapes(hf_config)

    def _ensure_published(self, step: int, wakes: Mapping[str, Wake], base_version: int) -> None:
        """Publish `step` unless the newest version is that of it. `wakes`: by model, as in `Delivery.deliver`."""
        newest = self._session.newest
        if newest is None or newest.step != step or not newest.is_coming():
            if self._live is None:
                raise UsageError(f"no model is attached: call publish_tensors({step}, …) before generation({step})")
            self._publish_attached(step, wakes=wakes, base_version=base_version)

    def _publish_attached(
        self,
        step: int,
        *,
        sync: bool = False,
        direct: bool = True,
        wakes: Mapping[str, Wake] | None = None,
        base_version: int = 0,
    ) -> Handle:
        with self._alone():
            if self._live is None:
                raise UsageError("no model is attached: call attach(model_chunks, hf_config) before publish")
            refuse_stale(self._chunks, sync=sync)
            return self._publish(step, self._live.items, direct=direct, wakes=wakes, base_version=base_version)

    def _delivery_of(self, live: LiveTensors | None, sender: "Sender | None" = None) -> Delivery:
        copy = transfer_copy() if self._release == TRANSFER and live is not None else None

        def device() -> "torch.device | None":
            found = copy.device if copy is not None else None
            return found or (live.device if live is not None else None)

        transports = TransportSelector(self._channel, self._transport, device)
        parts = self._channel, self._session, transports, sender
        check, prepare = (live.check if live is not None else None), None
        if self._quantised is not None:
            check, prepare = self._quantised.check, self._quantised.prepare
        return Delivery(
            *parts,
            staging_timeout=self._staging_timeout,
            direct_wait=self._direct_wait,
            check=check,
            prepare=prepare,
            copy=copy,
        )

    def _register(self, rank_layout: RankLayout, wait: bool, warnings: Sequence[str] = ()) -> None:
        if self._scheme is not None and self._quantised is None:
            raise UsageError("quantization_config needs attach(model, …): tensors that are given one by one are not cast")
        self._session.register(self._files, rank_layout, [*self._file_warnings, *warnings])
        self._delivery.declare()
        # Compiles while others register, rather than in a publish.
        compile_for(ITEM_SIZES[spec.dtype] for spec in rank_layout.tensors.values())
        if wait:
            self._session.assignment()

    def _publish(
        self,
        step: int,
        read: "Read",
        *,
        once: bool = False,
        direct: bool = False,
        wakes: Mapping[str, Wake] | None = None,
        then: Then | None = None,
        base_version: int = 0,
    ) -> Handle:
        timings: tracing.Timings = []
        self._delivery.finish_upload()
        self._session.start_publish(step)
        self._backpressure.wait(timings)
        wake = (wakes or {}).get(self.model)
        handle = self._delivery.deliver(
            step, read, timings, direct=direct, once=once, wake=wake, then=then, base_version=base_version
        )
        self._session.published(handle)
        self._backpressure.add(handle)
        return handle

    def _base_version(self, number: int | None) -> int:
        """Return `CreateVersionRequest.base_version`. Raises UsageError for a number that is none, or a model without a base."""
        if number is None:
            return 0
        if not self.base:
            raise UsageError(f"base_version={number} is for adapters: {self.model!r} has no base; connect(…, base=…)")
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"expected the number of a version of {self.base!r} as base_version, got {number!r}")
        return number


class TogetherPublisher(Publisher):
    """Publisher of several models from one attached model, such as BF16 to keep and FP8 to serve, by the same calls.

    Each model has its own publisher, versions and servers. The daemon makes versions of one step READY together, one of each
    model, or none. A rank therefore delivers all of them within the offer of the first: none is READY before the last one is
    delivered. In a generation on the direct path, each rank has delivered all of them when the servers of one of them wake.
    """

    def __init__(self, *args: Any, others: Publisher, **options: Any) -> None:
        """Create the publisher of the first model. `others`: that of the next one, which may have a next one too."""
        super().__init__(*args, **options)
        self._others = others
        self._by_model |= others._by_model

    def attach(
        self, model: "Model", hf_config: Config, tokenizer: Tokenizer | None = None, *, wait: bool = True, **options: Any
    ) -> None:
        """Register this rank's layout of every model, as `Publisher.attach` does for one."""
        super().attach(model, hf_config, tokenizer, wait=False, **options)
        self._others.attach(model, hf_config, tokenizer, wait=wait, **options)
        if wait:
            self._session.assignment()

    def attach_tensors(self, declared: Iterable[DeclaredTensor], *, wait: bool = True) -> None:
        """Raise UsageError: tensors that are given one by one are published as one model."""
        raise UsageError(_ONE_BY_ONE)

    def publish_tensors(
        self,
        step: int,
        items: "Iterable[TensorItem] | Callable[[], Iterable[TensorItem]]",
        *,
        base_version: int | None = None,
    ) -> Handle:
        """Raise UsageError: tensors that are given one by one are published as one model."""
        raise UsageError(_ONE_BY_ONE)

    def release(self) -> None:
        """Release the memory of every model, as `Publisher.release` does for one."""
        super().release()
        self._others.release()

    def close(self) -> None:
        """Close the publishers of all models."""
        self._others.close()
        super().close()

    def _publish(self, step: int, read: "Read", **options: Any) -> Handle:
        shared = {key: options[key] for key in ("direct", "wakes") if key in options}

        def deliver_others(first: Handle) -> None:
            found = self._others._publish_attached(step, **shared)
            first.also.update({self._others.model: found, **found.also})

        return super()._publish(step, read, **options, then=deliver_others)


class Backpressure:
    """Block a publish while `max_ahead` earlier versions are not served yet; None is no bound."""

    def __init__(self, max_ahead: int | None, timeout: float) -> None:
        if max_ahead is not None and max_ahead < 1:
            raise UsageError(f"expected max_ahead of at least 1 or None, got {max_ahead}")
        self._max_ahead, self._timeout = max_ahead, timeout
        self._ahead: deque[Handle] = deque()

    def wait(self, timings: tracing.Timings) -> None:
        """Wait until the bound permits another version; append the wait to `timings`. Raises WaitTimeout."""
        while self._max_ahead is not None and len(self._ahead) >= self._max_ahead:
            with tracing.timed(timings, "wait"), suppress(VersionAborted, NotFound):
                self._ahead[0].wait_serving(self._timeout)
            self._ahead.popleft()

    def add(self, handle: Handle) -> None:
        """Count a published version."""
        if self._max_ahead is not None:
            self._ahead.append(handle)

    def clear(self) -> None:
        """Forget earlier versions, because servers serve the newest one."""
        self._ahead.clear()


def compare_replicas(layout: "Layout", tensors: "Mapping[str, torch.Tensor]", world_size: int) -> None:
    """Compare the replicas of all ranks, a collective of torch's default process group.

    Raises ReplicasDiffer, and UsageError if that group does not span `world_size` ranks.
    """
    import torch.distributed as dist
    from resharder.converters.models.replicas import check_replicas

    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != world_size:
        raise UsageError(f"comparing parameters needs torch.distributed over all {world_size} ranks: it has {ranks}")
    check_replicas(layout, tensors)


def refuse_stale(chunks: "Sequence[torch.nn.Module]", *, sync: bool) -> None:
    """Raise StaleParameters for parameters that `overlap_param_gather` left stale.

    With `sync`, gather them instead, a collective of the data-parallel ranks.
    """
    if not chunks:
        return
    from resharder.converters.models.megatron.layout import gather_parameters, stale_parameters

    stale = stale_parameters(chunks)
    if stale and sync:
        gather_parameters(chunks)
    elif stale:
        raise StaleParameters(
            f"{len(stale)} parameters are older than other ranks' ({', '.join(stale[:4])}{', …' if len(stale) > 4 else ''}): "
            "overlap_param_gather gathers them in the next forward pass; call start_param_sync(force_sync=True) on every "
            "model chunk of every rank before publish, or publish(step, sync=True)"
        )
