"""The trainer SDK: three lines in a training loop.

from resharder.client import connect

publisher = connect("daemon:7677", model="policy")
publisher.attach(model_chunks, hf_config, tokenizer)
...
handle = publisher.publish(step)     # every rank; the weights may change as soon as it returns
"""

import os

from resharder.client.errors import UsageError
from resharder.client.rpc.channel import Channel, bound
from resharder.client.rpc.tls import Tls
from resharder.client.trainer.handle import Handle, Progress
from resharder.client.trainer.identity import identify
from resharder.client.trainer.model_files import Config, Tokenizer
from resharder.client.trainer.publisher import Publisher
from resharder.client.trainer.rank_layout import DeclaredTensor

__all__ = ["DeclaredTensor", "Handle", "Progress", "Publisher", "Tls", "connect"]


def connect(
    endpoint: str | None = None,
    *,
    model: str,
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
    direct_wait: float = 0.0,
    tls: Tls | None = None,
) -> Publisher:
    """This rank's way to publish versions of `model`.

    `endpoint`: `host:port`, else RESHARDER_ENDPOINT. `job`, `rank`, `world_size`: from torch.distributed where it is initialised
    (one broadcast of a random job id), else from RESHARDER_JOB, RANK and WORLD_SIZE. `config` and `tokenizer` are for
    `publish_tensors`.
    `transport`: `auto` writes into the daemon's shared memory where it can, `grpc` and `shared-memory` do nothing else.
    `max_ahead`: publish waits until fewer than so many of this trainer's versions are not served yet; None: no bound of its own.
    `connect_timeout`: seconds for which calls are repeated while the daemon cannot be reached; `staging_timeout`: to wait for
    room among UPLOADING versions or for servers; `register_timeout`: for the other ranks to register; None: no bound. `tls`: by
    default what RESHARDER_TLS_* specify.
    `direct_wait`: above 0, servers that can be reached take versions from this trainer's memory, GPU to GPU; `publish` then
    returns when all that are expected have done so, but keeps the weights no longer than so many seconds after the version is
    READY. Who comes later takes it from the daemon.

    Raises UsageError. Nothing is sent before something is attached.
    """
    where = endpoint or os.environ.get("RESHARDER_ENDPOINT")
    if not where:
        raise UsageError("expected the daemon's endpoint, got none: pass host:port or set RESHARDER_ENDPOINT")
    publisher = Publisher(
        Channel(where, connect_timeout, tls),
        model,
        identify(job, rank, world_size),
        transport=transport,
        max_ahead=max_ahead,
        staging_timeout=bound(staging_timeout),
        register_timeout=bound(register_timeout),
        direct_wait=direct_wait,
    )
    if config is not None:
        publisher.attach_config(config, tokenizer)
    return publisher
