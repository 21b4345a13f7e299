"""Whole tensors of a version, one after the other: from the daemon's shared memory, and in parts over the wire."""

import pytest
import torch
from resharder.client.errors import CorruptData
from resharder.client.trainer.connect import connect
from resharder.client.versions.source import open_source, whole_tensors

from tests.client.models import CONFIG, equal
from tests.support.daemon import Daemon

FULL = {
    "large": torch.arange(3 << 20, dtype=torch.int32).view(-1, 1024),  # in 12 chunks
    "small": torch.arange(6, dtype=torch.float32).to(torch.bfloat16).view(2, 3),
    "scalar": torch.tensor(2.5),
}


def publish(daemon: Daemon, model: str) -> str:
    with connect(daemon.endpoint, model=model, config=CONFIG) as publisher:
        handle = publisher.publish_tensors(1, FULL.items())
        handle.wait_ready()
    return f"resharder://{daemon.endpoint}/{handle.name}"


@pytest.mark.parametrize("shared", [True, False])
def test_every_tensor_of_a_version_arrives_whole(shared: bool, daemon: Daemon) -> None:
    with open_source(publish(daemon, f"whole-{shared}"), shared=shared) as source:
        found = {name: tensor.clone() for name, tensor in whole_tensors(source)}
    assert equal(found, FULL)


def test_a_tensor_with_a_wrong_byte_is_refused_by_name(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_source(publish(daemon, "torn"), shared=False) as source:
        digests = source.digests
        monkeypatch.setattr(
            source, "digests", lambda wanted: {key: value ^ (key[0] == "small") for key, value in digests(wanted).items()}
        )
        with pytest.raises(CorruptData, match=r"small: expected digest [0-9a-f]{16}, got "):
            list(whole_tensors(source))
