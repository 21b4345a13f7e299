"""examples/grpo as a user runs it, for a few steps: its own daemon, two Megatron ranks and a vLLM server."""

import pytest

from examples.grpo.main import run

pytestmark = [pytest.mark.full, pytest.mark.engine]


def test_every_step_trains_on_samples_of_versions_that_the_job_has_published_and_its_last_version_is_served() -> None:
    history = run(steps=3, seed=0)
    assert [step.step for step in history.steps] == [1, 2, 3]
    assert all(0 <= step.max_lag <= 2 or step.dropped for step in history.steps)
    assert history.pauses[-1].version == history.steps[-1].version


def test_every_step_trains_an_adapter_on_samples_of_its_versions_over_a_base_that_does_not_change() -> None:
    history = run(steps=3, seed=0, lora=True)
    assert [step.step for step in history.steps] == [1, 2, 3]
    assert [step.version for step in history.steps] == [2, 3, 4], "versions of the adapter, which the samples name"
    assert all(0 <= step.max_lag <= 2 or step.dropped for step in history.steps)
    assert history.pauses[-1].version == 4
