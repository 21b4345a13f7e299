"""Results of the demo, and whether they meet its claims."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LOGPROB_TOLERANCE = 1e-4  # fp32; Megatron and the engines sum in different orders


@dataclass
class VersionResult:
    version: int
    bytes: int
    publish_s: float  # from publish() to READY, the slowest rank
    stage_s: float
    apply_s: float  # copies and verification, in the worker
    pause_s: float  # as the control side measured it
    digests_equal: bool
    tokens_equal: bool  # the server's greedy tokens are Megatron's, and the header names this version
    logprob_diff_megatron: float
    answer_before: Sequence[int]
    answer_after: Sequence[int]

    @property
    def ok(self) -> bool:
        proven = self.digests_equal and self.tokens_equal and self.logprob_diff_megatron <= LOGPROB_TOLERANCE
        return proven and self.answer_before != self.answer_after


@dataclass
class RunResult:
    model: str
    trainer: str
    server: str
    versions: list[VersionResult] = field(default_factory=list)
    fresh_server_equal: bool = False
    streamed_tokens: int = 0
    stream_unbroken: bool = False

    @property
    def ok(self) -> bool:
        served = self.fresh_server_equal and self.stream_unbroken and self.streamed_tokens > 0
        return served and len(self.versions) == 3 and all(version.ok for version in self.versions)


def as_json(results: Sequence[RunResult]) -> dict[str, Any]:
    return {"ok": all(result.ok for result in results), "runs": [asdict(result) for result in results]}
