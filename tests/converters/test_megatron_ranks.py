"""What real Megatron ranks compute after every parameter was filled through its layout: one run of four processes, many cases."""

import json
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import UNBUILT
from tests.support.megatron_ranks import FAMILY, FORWARD
from tests.support.ranks import forked
from tests.support.variants import selected, variants

pytestmark = pytest.mark.compat("logits")

FEW = 3


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    fakepg.leave()
    folder = tmp_path_factory.mktemp("ranks")
    cases = selected(request, "case")
    for family in {FAMILY, *(FORWARD[case][0] for case in cases)}:
        tiny_hf.save_checkpoint(folder / family, tiny_hf.tiny_config(family))
    forked("tests.support.megatron_ranks", folder, *cases)
    findings: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return findings


def test_every_family_is_computed_by_several_ranks() -> None:
    assert {family for family, _ in FORWARD.values()} == set(tiny_hf.ALL) - UNBUILT


@pytest.mark.parametrize("case", variants({name: layout for name, (_, layout) in FORWARD.items()}, FEW))
def test_ranks_together_compute_the_logits_of_the_checkpoint(found: dict[str, Any], case: str) -> None:
    assert found[case] < tiny_hf.tolerance(FORWARD[case][0])


def test_parameters_that_a_late_gather_leaves_behind_are_named_and_do_differ(found: dict[str, Any]) -> None:
    late = found["late gather"]
    assert late["at first"] == 0
    assert late["after the step"] == late["parameters"]
    assert late["ranks differ"]


def test_replicas_that_differ_are_named_with_their_ranks_on_every_rank(found: dict[str, Any]) -> None:
    complaints = found["replicas"]
    assert complaints["data parallel, equal"] == complaints["tied, equal"] == ""
    changed = "model.layers.2.mlp.down_proj.weight[0:128, 96:192]: the values of its owner, rank 1, are not those of rank 3"
    assert complaints["data parallel, changed"] == changed
    tied = "model.embed_tokens.weight[0:502, 0:128]: the values of its owner, rank 0, are not those of rank 2"
    assert complaints["tied, changed"] == tied


def test_after_the_gather_nothing_is_stale(found: dict[str, Any]) -> None:
    assert found["late gather"]["after the gather"] == 0
    assert not found["late gather"]["ranks differ then"]
