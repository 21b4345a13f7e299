"""Objective of GRPO for samples of several versions: group advantages, importance weights, a bound on the lag.

Tensors are [responses, tokens] unless stated otherwise; responses to one prompt are consecutive.
"""

from collections.abc import Mapping, Sequence

import torch

from examples.grpo.samples import Sample


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """Return rewards relative to those of the same prompt, in standard deviations, [responses].

    Args:
        rewards: [responses].
        group: Responses per prompt.
    """
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True, unbiased=False) + 1e-4)).view(-1)


def lags(samples: Sequence[Sample], steps: Mapping[int, int], current: int) -> torch.Tensor:
    """Return by how many optimizer steps the weights of each token lag behind the trainer's, int64.

    Args:
        samples: Responses of equal length.
        steps: Optimizer step of each version.
        current: Steps that the trainer's weights have seen.

    Raises:
        KeyError: A sample names a version that the trainer has not published.
    """
    return torch.tensor([[current - steps[version] for version in sample.versions] for sample in samples])


def policy_loss(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, keep: torch.Tensor, clip: float = 0.2
) -> torch.Tensor:
    """Return PPO's clipped objective, negated: the mean over the tokens to keep.

    The ratio of the probabilities by the trainer's weights and by those that sampled the token weights a stale token; tokens
    that are too stale are dropped.

    Args:
        logprobs: Log-probabilities by the trainer's weights.
        sampled: Log-probabilities by the weights that sampled the tokens.
        advantages: [responses].
        keep: Bool, False for dropped tokens.
        clip: Bound on the distance of the ratio from 1.
    """
    ratio = (logprobs - sampled).exp()
    gain = advantages[:, None]
    objective = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return -(objective * keep).sum() / keep.sum().clamp(min=1)
