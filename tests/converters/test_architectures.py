"""What `resharder architectures` says of each family is what the tests do."""

from resharder.converters.architectures import ARCHITECTURES

from tests.support import tiny_hf


def test_every_family_said_to_be_proven_by_logits_is_among_those_whose_logits_are_compared() -> None:
    compared = {tiny_hf.tiny_config(family)["model_type"] for family in tiny_hf.ALL}
    proven = {a.model_type for a in ARCHITECTURES if a.proof == "logits"}
    assert proven == compared
    assert all(a.proof == "logits" or a.proof.startswith("layout: ") for a in ARCHITECTURES)
