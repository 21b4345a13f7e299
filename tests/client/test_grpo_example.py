"""Pure parts of examples/grpo: the task, samples with the version of each token, the objective, the record and its chart."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.grpo.chart import IMAGE, RESULTS, svg
from examples.grpo.history import FIRST, LAST, History, Pause, Step, append, read, read_steps
from examples.grpo.objective import group_advantages, lags, policy_loss
from examples.grpo.reward import EVEN, ODD, prompts, reward
from examples.grpo.samples import Sample, oldest_adapter, read_answer


def answer(versions: list[dict[str, Any]], tokens: int = 4) -> dict[str, Any]:
    """Return an answer of vLLM's `/inference/v1/generate`, as 0.32 gives it."""
    content = [{"token": f"t{token}", "logprob": -0.5 * token} for token in range(tokens)]
    choice = {"token_ids": list(range(tokens)), "logprobs": {"content": content}, "weight_versions": versions}
    return {"choices": [choice]}


def step(number: int, reward: float = 0.5) -> Step:
    return Step(number, number + 1, reward, lag=0.5, max_lag=1, mixed=0, dropped=0.0, seconds=1.0)


def test_a_response_across_an_install_has_the_version_of_each_token() -> None:
    spans = [{"start": 0, "end": 3, "version": "7"}, {"start": 3, "end": 4, "version": "8"}]
    (sample,) = read_answer([9, EVEN], answer(spans))
    assert sample == Sample((9, EVEN), (0, 1, 2, 3), (0.0, -0.5, -1.0, -1.5), (7, 7, 7, 8))
    assert sample.mixed
    assert not read_answer([9, EVEN], answer([{"start": 0, "end": 4, "version": "7"}]))[0].mixed


def test_a_response_of_an_adapter_has_the_oldest_version_that_its_header_names() -> None:
    assert [oldest_adapter(header) for header in ("8", "8;policy-lora=3", "8;policy-lora=4,3")] == [None, 3, 3]
    (sample,) = read_answer([9, EVEN], answer([{"start": 0, "end": 4, "version": "8"}]), 3)
    assert sample.versions == (3, 3, 3, 3)


@pytest.mark.parametrize("spans", [[], [{"start": 0, "end": 3, "version": "7"}]])
def test_a_token_without_a_version_is_refused(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=rf"each of 4 tokens, got 4 and {sum(s['end'] for s in spans)}"):
        read_answer([9, EVEN], answer(spans))


def test_prompts_repeat_with_their_seed_and_the_instruction_decides_the_reward() -> None:
    assert prompts(6, seed=3) == prompts(6, seed=3) != prompts(6, seed=4)
    assert [prompt[-1] for prompt in prompts(4, seed=3)] == [EVEN, ODD, EVEN, ODD]
    assert reward([9, 9, 9, EVEN], [2, 4, 5, 7]) == reward([9, 9, 9, ODD], [2, 4, 5, 7]) == 0.5
    assert (reward([9, EVEN], [2, 8]), reward([9, ODD], [2, 8]), reward([9, ODD], [])) == (1.0, 0.0, 0.0)


def test_advantages_are_relative_to_the_responses_to_the_same_prompt() -> None:
    found = group_advantages(torch.tensor([0.0, 1.0, 0.4, 0.4]), group=2)
    assert torch.allclose(found, torch.tensor([-1.0, 1.0, 0.0, 0.0]), atol=1e-3)


def test_the_lag_of_a_token_is_counted_in_optimizer_steps() -> None:
    samples = [Sample((1,), (2, 3), (0.0, 0.0), (4, 6)), Sample((1,), (2, 3), (0.0, 0.0), (6, 6))]
    assert lags(samples, {4: 0, 6: 1}, current=2).tolist() == [[2, 1], [1, 1]]
    with pytest.raises(KeyError):
        lags(samples, {4: 0}, current=2)


def test_stale_tokens_are_weighted_up_to_the_clip_and_dropped_tokens_have_no_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    sampled = torch.tensor([[-1.0, -1.0 - math.log(1.1), -3.0]])
    loss = policy_loss(logprobs, sampled, torch.tensor([2.0]), torch.tensor([[True, True, True]]))
    assert loss.item() == pytest.approx(-2.0 * (1.0 + 1.1 + 1.2) / 3)
    loss = policy_loss(logprobs, sampled, torch.tensor([2.0]), torch.tensor([[True, False, False]]))
    loss.backward()
    assert loss.item() == pytest.approx(-2.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-2.0, 0.0, 0.0]]


def test_steps_are_read_while_the_last_line_is_still_being_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert read_steps(path) == []
    append(path, step(1))
    with path.open("a") as lines:
        lines.write('{"step": 2, "ver')
    assert read_steps(path) == [step(1)]


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    history = History([step(1, 0.5), step(2, 0.7)], [Pause(2, 0.05)])
    history.write(tmp_path / "run.json")
    assert read(tmp_path / "run.json") == history
    assert history.mean_reward(slice(2)) == pytest.approx(0.6)


def test_the_committed_chart_is_drawn_from_the_committed_run_in_which_the_reward_rises() -> None:
    history = read(RESULTS)
    assert IMAGE.read_text() == svg(history), "run `python -m examples.grpo.chart`"
    assert history.mean_reward(LAST) - history.mean_reward(FIRST) >= 0.2
    assert max(record.max_lag for record in history.steps) >= 1
    assert sum(record.mixed for record in history.steps) > 0
