"""The trainer's half of vLLM's weight transfer backend `resharder`.

Read against 0.32 and 0.33 (`vllm/distributed/weight_transfer`).

    engine = WeightTransferTrainerFactory.trainer_init(
        ResharderTrainerInitInfo(rank=rank, model="policy"), client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model)
    )
    engine.send_weights()          # every rank, after each optimizer step

`send_weights` publishes a version. The daemon installs it on every server of the model, those of `client`
among them; vLLM's calls only wait for these. Importing this module registers the backend.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from resharder.client.errors import NotServed, UsageError
from resharder.client.integrations.weight_sources import SourcePart, part_of
from resharder.client.settings import MODEL
from resharder.client.trainer.connect import connect
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.identity import identify
from resharder.client.trainer.model_files import Config, Tokenizer
from resharder.client.trainer.publisher import Publisher
from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

if TYPE_CHECKING:
    from resharder.converters.models.hf_names import Model

__all__ = ["ResharderTrainerEngine", "ResharderTrainerInitInfo", "ShardSource"]

BACKEND = "resharder"


@dataclass(frozen=True)
class ShardSource:
    """A model that every rank publishes by its own shards, without a gather. For this backend only.

    Attributes:
        model: What `Publisher.attach` takes: Megatron's chunks, or a module of DTensors, its parts or a state dict.
        options: Further arguments of `Publisher.attach`: `rename`, `ranks`, `check_replicas`.
    """

    model: "Model"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ResharderTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The trainer's settings. `rank` is this process's rank; rank 0 calls the servers.

    Attributes:
        model: Name of the model; by default RESHARDER_MODEL.
        endpoint: The daemon's `host:port`; by default RESHARDER_ENDPOINT.
        config: transformers config or content of config.json; by default the source module's `config`.
        tokenizer: Object with `save_pretrained`, or a folder; None publishes no tokenizer.
        job: Id that all ranks share, as in `connect`.
        world_size: Number of ranks; by default torch.distributed's, else WORLD_SIZE, else 1.
        timeout: Bound in seconds on the wait for READY.
        options: Further arguments of `connect`, such as `direct_wait` or `tls`.
    """

    backend: ClassVar[str] = BACKEND

    model: str = ""
    endpoint: str | None = None
    config: Config | None = None
    tokenizer: Tokenizer | None = None
    job: str | None = None
    world_size: int | None = None
    timeout: float | None = 600.0
    options: dict[str, Any] = field(default_factory=dict)


class ResharderTrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Implementation of vLLM's interface. One thread at a time may use it."""

    init_info_cls = ResharderTrainerInitInfo

    def __init__(self, info: ResharderTrainerInitInfo, publisher: Publisher, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        self.handle: Handle | None = None
        """The version of the last `send_weights`."""
        self._info, self._publisher, self._step = info, publisher, 0
        self.rank = info.rank  # vLLM 0.33 has it as an argument
        self._shards = _sharded(source)
        self._part: SourcePart | None = None

    @classmethod
    def trainer_init(cls, init_info: ResharderTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Register the ranks' weights with the daemon, and check that the servers follow the model. Every rank must call.

        Raises:
            UsageError: An argument is missing or wrong.
            NotServed: A server follows another model, or does not have this backend.
            ResharderError: As in `connect` and `Publisher.attach`.
        """
        if source is None:
            raise UsageError("no source was given: pass a WeightSource")
        rank, world_size = init_info.rank, _world_size(init_info)
        publisher = connect(
            init_info.endpoint,
            model=_model(init_info),
            job=init_info.job,
            rank=rank,
            world_size=world_size,
            **init_info.options,
        )
        try:
            engine = cls(init_info, publisher, client=client, source=source)
            engine._attach()
            if engine.is_sender:
                with _answers(f"{client!r} to follow model {publisher.model!r}"):
                    client.init_weight_transfer_engine({"model": publisher.model})
        except BaseException:
            publisher.close()
            raise
        return engine

    def send_weights(self, step: int | None = None) -> None:
        """Publish a version and wait until the servers of `client` serve it or a newer one. Every rank must call.

        On ranks other than 0 it returns when the rank's part is delivered. The weights may change then.

        Args:
            step: Label of the version, increasing; by default the number of the call.

        Raises:
            NotServed: The version is READY, and a server of `client` does not serve it. Rank 0 only.
            ResharderError: As in `Publisher.publish`.
        """
        step = self._step + 1 if step is None else step
        self._step = step
        self.handle = handle = self._publish(step)
        if not self.is_sender:
            return
        handle.wait_ready(self._info.timeout)
        with _answers(f"{handle.name} to be served"):
            self.client.start_weight_update()
            self.client.update_weights({"version": handle.version, "fingerprint": handle.get().fingerprint})
            self.client.finish_weight_update(str(handle.version))

    def shutdown(self) -> None:
        """Stop renewing the lease. Published versions remain."""
        self._publisher.close()

    def _attach(self) -> None:
        config, tokenizer = _config(self._info, self._shards), self._info.tokenizer
        if self._shards is not None:
            self._publisher.attach(self._shards.model, config, tokenizer, **self._shards.options)
            return
        self._publisher.attach_config(config, tokenizer)
        identity = self._publisher.identity
        self._part = part_of(self.source, identity.rank, identity.world_size)
        self._publisher.attach_tensors(self._part.declared)

    def _publish(self, step: int) -> Handle:
        if self._part is None:
            return self._publisher.publish(step)
        if self._publisher.identity.world_size == 1:
            return self._publisher.publish_tensors(step, self._part.stream)
        # A second pass, for a daemon that has restarted, would be a collective that other ranks do not enter.
        stream = self._part.stream()
        try:
            return self._publisher.publish_tensors(step, iter(stream))
        finally:
            stream.drain()


def _sharded(source: Any) -> ShardSource | None:
    """Return the source of a model whose shards can be published in place; None for any other stream."""
    if isinstance(source, ShardSource):
        return source
    module = getattr(source, "_module", None) if type(source) is ModuleSource else None
    return None if module is None else ShardSource(module)


def _model(info: ResharderTrainerInitInfo) -> str:
    if not (model := info.model or MODEL.text()):
        raise UsageError("the model has no name: set ResharderTrainerInitInfo(model=…) or RESHARDER_MODEL")
    return model


def _world_size(info: ResharderTrainerInitInfo) -> int:
    if info.world_size is not None:
        return info.world_size
    return identify(info.job or "-", None, None).world_size


def _config(info: ResharderTrainerInitInfo, shards: ShardSource | None) -> Config:
    config = info.config if info.config is not None else getattr(shards and shards.model, "config", None)
    if config is None or not (isinstance(config, Mapping) or hasattr(config, "save_pretrained")):
        raise UsageError(
            "the model's Hugging Face config is missing, and the source has no module with a transformers config: set "
            "ResharderTrainerInitInfo(config=…)"
        )
    return config


@contextmanager
def _answers(expected: str) -> Iterator[None]:
    """Convert errors of vLLM's client, whose own message does not have the server's."""
    try:
        yield
    except Exception as error:
        raise NotServed(f"expected {expected}, got {_message_of(error)}") from error


def _message_of(error: Exception) -> str:
    """Return a server's message from an error of vLLM's HTTP or Ray client, else the error's own."""
    response, cause = getattr(error, "response", None), getattr(error, "cause", None)
    if isinstance(cause, Exception):  # Ray's own message is the actor's traceback
        return str(cause)
    try:
        return str(response.json()["error"]["message"])  # type: ignore[union-attr]
    except Exception:  # no response, or not one of vLLM's
        return f"{type(error).__name__}: {error}"


if BACKEND not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine(BACKEND, ResharderTrainerEngine)
