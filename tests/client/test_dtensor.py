"""Four real ranks of FSDP2 over tensor parallelism publish; versions are what torch itself gathers."""

from pathlib import Path

import torch
from resharder.client.operator import Operator

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.ranks import forked
from tests.support.tiny_hf import load_checkpoint, save_checkpoint, tiny_config


def test_versions_over_steps_a_resumed_job_and_an_exchange_are_the_whole_state_dict_bit_for_bit_and_have_no_warning(
    tmp_path: Path,
) -> None:
    source = save_checkpoint(tmp_path / "source", tiny_config("qwen3"), seed=3)
    with Daemon(keep_count=4) as daemon, Operator(daemon.endpoint) as operator:
        forked("tests.client.dtensor_ranks", daemon.endpoint, tmp_path)
        versions = [exported(daemon.endpoint, number, tmp_path / number) for number in ("1", "2", "3", "4")]
        assert [version.warnings for version in operator.versions()] == [()] * 4
    files = ("before", "after", "resumed", "exchanged", "again")
    before, after, resumed, exchanged, again = (torch.load(tmp_path / f"{name}.pt") for name in files)
    assert equal(versions[0], before)
    assert equal(versions[0], load_checkpoint(source))
    assert equal(versions[1], after)
    assert equal(versions[2], resumed)
    assert equal(versions[3], exchanged)
    assert equal(exchanged, {name: 2 * tensor for name, tensor in resumed.items()})
    for former, later in ((before, after), (after, resumed)):
        assert [name for name in former if torch.equal(former[name], later[name])] == ["model.embed_tokens.weight"]
    assert equal(again, before)


def test_a_model_with_a_tower_is_published_as_it_was_released_before_and_after_a_step_on_an_image(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "source", tiny_config("qwen3_vl_moe"), seed=3)
    (source / "preprocessor_config.json").write_text("{}")
    with Daemon(keep_count=4) as daemon:
        forked("tests.client.vision_ranks", daemon.endpoint, tmp_path)
        before, after = (exported(daemon.endpoint, number, tmp_path / number) for number in ("1", "2"))
    assert (tmp_path / "1" / "preprocessor_config.json").is_file()
    assert equal(before, load_checkpoint(source))
    gathered = torch.load(tmp_path / "after.pt")
    turned = (".experts.gate_up_proj", ".experts.down_proj")
    assert equal(after, {name: tensor.mT if name.endswith(turned) else tensor for name, tensor in gathered.items()})
    assert [name for name in before if torch.equal(before[name], after[name]) and "embed_tokens" not in name] == []
