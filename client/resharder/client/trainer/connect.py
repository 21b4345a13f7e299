"""Trainer SDK: three lines in a training loop.

from resharder.client import connect

publisher = connect("daemon:7677", model="policy")
publisher.attach(model_chunks, hf_config, tokenizer)
...
handle = publisher.publish(step)     # every rank; the weights may change as soon as it returns
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from resharder.client.deprecated import warn_renamed
from resharder.client.errors import UsageError
from resharder.client.rpc.channel import Channel, bound, endpoint_or_default
from resharder.client.rpc.tls import Tls
from resharder.client.trainer.handle import Handle, Progress
from resharder.client.trainer.identity import identify
from resharder.client.trainer.model_files import Config, Tokenizer
from resharder.client.trainer.publisher import Publisher, TogetherPublisher
from resharder.client.trainer.rank_layout import DeclaredTensor
from resharder.converters.allowances import unknown_names
from resharder.converters.errors import ConversionError
from resharder.converters.quantization.scheme import Scheme, scheme_of

__all__ = ["DeclaredTensor", "Handle", "Progress", "Publisher", "Tls", "connect"]


def connect(
    endpoint: str | None = None,
    *,
    model: str,
    base: str | None = None,
    job: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    config: Config | None = None,
    tokenizer: Tokenizer | None = None,
    transport: str = "auto",
    max_ahead: int | None = None,
    connect_timeout: float | None = 60.0,
    staging_timeout: float | None = 600.0,
    register_timeout: float | None = 600.0,
    direct_wait: float | None = None,
    release: str = "delivery",
    tls: Tls | None = None,
    skipped: bool = False,
    quantization_config: Mapping[str, Any] | None = None,
    also: Mapping[str, Mapping[str, Any] | None] | None = None,
    set_aside: bool | None = None,
) -> Publisher:
    """Return this rank's publisher of a model. The daemon is not called before something is attached.

    Args:
        endpoint: Address as `host:port`; by default RESHARDER_ENDPOINT.
        model: Name of the model.
        base: Name of the model that `model`, a LoRA adapter, is loaded beside; it need not have a version yet. `attach` then
            finds the adapter's parameters in the model, and a version is a PEFT folder of them. None for a model of its own.
        job: Id that the job's ranks share; by default RESHARDER_JOB, else a random one, broadcast over torch.distributed.
        rank: This rank; by default torch.distributed's, else RANK, else 0.
        world_size: Number of ranks; by default torch.distributed's, else WORLD_SIZE, else 1.
        config: transformers config or content of config.json, for `publish_tensors`; of an adapter PEFT's LoraConfig or the
            content of adapter_config.json.
        tokenizer: Object with `save_pretrained`, or a folder, for `publish_tensors`.
        transport: `auto` writes into the daemon's shared memory if possible, else sends by HTTP to its data port, else by gRPC.
            `shared-memory`, `http` and `grpc` force one; `http` continues by gRPC where the port cannot be used.
        max_ahead: `publish` waits until fewer than this number of the trainer's versions are not served yet; None is no bound.
        connect_timeout: Seconds for which calls are retried while the daemon cannot be reached; None is no bound.
        staging_timeout: Seconds to wait for capacity among UPLOADING versions, or for servers; None is no bound.
        register_timeout: Seconds to wait for the other ranks to register; None is no bound.
        direct_wait: By default, servers that serve versions ahead of READY take them from this trainer's memory, if they are on
            the host of all ranks or have proven a fast link to them; `publish` returns when they have done so, at most 2 s later
            than without, or when a transfer that has begun by then has ended. Above 0, servers on any host and of any fleet do,
            and `publish` returns when all expected ones have done so, at most this many seconds after READY. Later servers use
            the store, and with 0 all do.
        release: When `publish` returns, besides `direct_wait`. `delivery`: when the store or the network has the bytes.
            `transfer`: when this process has a copy of them, from which it uploads while the trainer goes on. It has the size
            of the boxes that the rank sends, and is kept: in the memory of another GPU that the process sees, else of the host
            (pinned for a GPU's tensors). Without room for it, `publish` returns as with `delivery`, which is logged once. For
            attached models.
        tls: TLS settings; by default those of the RESHARDER_TLS_* variables.
        skipped: The target `latest` of fleets skips the versions of this job while the model has others; `update N` serves
            them. The first version of a model is never skipped.
        quantization_config: Format to which ranks cast the attached model for each version, as in a config.json:
            `{"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}`, or compressed-tensors'
            form of FP8 by channel. None publishes tensors in the trainer's dtype.
        also: Further models that the same calls publish, each with its quantization_config or None. Each has its own versions;
            those of one step are READY together with that of `model`, or none is.
        set_aside: Earlier name of `skipped`, for one release.

    Returns:
        The publisher, a context manager.

    Raises:
        UsageError: An argument, or a name in RESHARDER_ALLOW, is missing or wrong.
    """
    if set_aside is not None:
        warn_renamed("connect(set_aside=…)", "connect(skipped=…)")
        skipped = set_aside
    if wrong := unknown_names():
        raise UsageError(wrong)
    if model in (also or {}):
        raise UsageError(f"also names {model!r}, which is the first model already: leave it out")
    if base is not None:
        _check_adapter_options(model, base, quantization_config=quantization_config, also=also, direct_wait=direct_wait)
    formats = {model: quantization_config, **(also or {})}
    together = tuple(formats) if also else ()
    identity = replace(identify(job, rank, world_size), skipped=skipped, together=together)
    publisher: Publisher | None = None
    for name, format_ in reversed(formats.items()):
        publisher = _publisher(publisher)(
            Channel(endpoint_or_default(endpoint), connect_timeout, tls),
            name,
            identity,
            transport=transport,
            max_ahead=max_ahead,
            staging_timeout=bound(staging_timeout),
            register_timeout=bound(register_timeout),
            direct_wait=0.0 if base else direct_wait,
            scheme=_scheme_of(format_),
            base=base or "",
            release=release,
        )
    assert publisher is not None
    if config is not None:
        publisher.attach_config(config, tokenizer)
    return publisher


def _check_adapter_options(model: str, base: str, **options: object) -> None:
    """Raise UsageError for a base that no adapter can have, or an option that is not for adapters."""
    if not base or base == model:
        raise UsageError(f"expected the name of another model as base of adapter {model!r}, got {base!r}")
    if given := [name for name, value in options.items() if value]:
        raise UsageError(
            f"{given[0]} is for models of their own: an adapter such as {model!r} is published in the trainer's dtype, by a "
            f"publisher of its own and through the daemon; leave {given[0]} out"
        )


def _publisher(next_: Publisher | None) -> Callable[..., Publisher]:
    return Publisher if next_ is None else partial(TogetherPublisher, others=next_)


def _scheme_of(quantization_config: Mapping[str, Any] | None) -> Scheme | None:
    try:
        return None if quantization_config is None else scheme_of(quantization_config)
    except ConversionError as error:
        raise UsageError(str(error)) from error
