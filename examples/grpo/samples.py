"""Responses of the server, with the version of the weights that computed each token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sample:
    """Response to a prompt. `logprobs` and `versions` have one item for each token of the response."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probabilities at the time of sampling, by the weights of `versions`."""
    versions: tuple[int, ...]

    @property
    def mixed(self) -> bool:
        """Whether an install happened in the middle of the response."""
        return len(set(self.versions)) > 1


def oldest_adapter(header: str) -> int | None:
    """Return the version of the adapter in X-Resharder-Version, the oldest if a new one came between the responses of a group.

    Args:
        header: `8` or, for an adapter, `8;policy-lora=3` or `8;policy-lora=3,4`.
    """
    _, _, versions = header.partition("=")
    return min(map(int, versions.split(","))) if versions else None


def read_answer(prompt: Sequence[int], answer: Mapping[str, Any], adapter: int | None = None) -> list[Sample]:
    """Return the samples of an answer of vLLM's `/inference/v1/generate`.

    Args:
        prompt: Token ids.
        answer: Its body.
        adapter: The version of the adapter that the request named. Without one, the answer has the versions of the tokens.

    Raises:
        ValueError: A token has no log-probability or no version.
    """
    return [_sample(prompt, choice, adapter) for choice in answer["choices"]]


def _sample(prompt: Sequence[int], choice: Mapping[str, Any], adapter: int | None) -> Sample:
    tokens = choice["token_ids"]
    logprobs = [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ()]
    versions: list[int | None] = [adapter] * len(tokens)
    for span in (choice.get("weight_versions") or ()) if adapter is None else ():
        versions[span["start"] : span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
    known = [version for version in versions if version is not None]
    if len(logprobs) != len(tokens) or len(known) != len(tokens):
        raise ValueError(
            f"expected a log-probability and a version for each of {len(tokens)} tokens, got {len(logprobs)} and {len(known)}"
        )
    return Sample(tuple(prompt), tuple(tokens), tuple(logprobs), tuple(known))
