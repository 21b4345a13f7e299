"""A job of one rank that publishes a tiny model."""

from pathlib import Path

from resharder.client import Publisher, connect

from tests.support.daemon import Daemon
from tests.support.tiny_hf import tiny_config

CONFIG = tiny_config("qwen3_tied")


def job(daemon: Daemon, folder: Path, name: str) -> Publisher:
    return connect(daemon.endpoint, model="policy", job=name, rank=0, world_size=1, config=CONFIG, tokenizer=folder)
