"""Four real ranks of FSDP2 over tensor parallelism publish; versions are what torch itself gathers."""

from pathlib import Path

import torch

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.ranks import forked
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config


def test_versions_before_and_after_a_step_and_an_exchange_are_the_whole_state_dict_bit_for_bit(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "source", tiny_config("qwen3"), seed=3)
    with Daemon() as daemon:
        forked("tests.client.dtensor_ranks", daemon.endpoint, tmp_path)
        versions = [exported(daemon.endpoint, number, tmp_path / number) for number in ("1", "2", "3")]
    files = ("before", "after", "exchanged", "again")
    before, after, exchanged, again = (torch.load(tmp_path / f"{name}.pt") for name in files)
    assert equal(versions[0], before)
    assert equal(versions[0], load_checkpoint(source))
    assert equal(versions[1], after)
    assert equal(versions[2], exchanged)
    assert equal(exchanged, {name: 2 * tensor for name, tensor in after.items()})
    assert not any(torch.equal(before[name], after[name]) for name in before)
    assert equal(again, before)
