"""A data port that tells a transfer engine's keys, and nothing else."""

from typing import Any, cast

from resharder.server.data.connection import DataReads
from resharder.server.data.port import DataPort
from resharder.server.node.nixl import NixlEngine


class EnginePort:
    """The port of one engine, which has its session from then on."""

    def __init__(self, engine: NixlEngine) -> None:
        reads = DataReads(cast(Any, None), cast(Any, None), local_only=True, engine=engine.keys)
        self._port = DataPort("127.0.0.1", 0, reads)
        engine.at(f"127.0.0.1:{self._port.port}")

    def __enter__(self) -> "EnginePort":
        return self

    def __exit__(self, *_: object) -> None:
        self._port.close()
