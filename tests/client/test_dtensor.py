"""Four real ranks of FSDP2 over tensor parallelism publish; versions are what torch itself gathers."""

from pathlib import Path

import torch

from tests.client.models import equal, exported
from tests.client.ranks import torchrun
from tests.support.daemon import Daemon
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config


def test_versions_before_and_after_a_step_are_the_whole_state_dict_bit_for_bit(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "source", tiny_config("qwen3"), seed=3)
    with Daemon() as daemon:
        torchrun("tests.client.dtensor_ranks", daemon.endpoint, tmp_path)
        versions = [exported(daemon.endpoint, number, tmp_path / number) for number in ("1", "2")]
    before, after, again = (torch.load(tmp_path / f"{name}.pt") for name in ("before", "after", "again"))
    assert equal(versions[0], before)
    assert equal(versions[0], load_checkpoint(source))
    assert equal(versions[1], after)
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert equal(again, before)
