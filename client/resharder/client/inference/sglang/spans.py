"""Spans: the versions that computed a request's tokens; read against 0.5.17 and 0.5.23.

SGLang 0.5.23 notes for each request at which token the weight version changed (`utils/weight_versions.py`). 0.5.17 does not: the
plugin notes it there, and sends the spans as an entry of `customized_info`, which detokenizers pass on and the tokenizer manager
takes out again.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from resharder.client.inference.control.labels import Label
from resharder.client.inference.version_page import page
from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle
from sglang.srt.managers.scheduler_components import output_streamer

try:
    from sglang.srt.utils.weight_versions import compute_weight_version_spans
except ImportError:  # 0.5.17
    compute_weight_version_spans = None

SENT_BY_SGLANG = compute_weight_version_spans is not None
_KEY = "resharder"  # of `customized_info`, and of attributes


class Span(NamedTuple):
    """Tokens of a request that one version computed."""

    version: int
    """0 for weights that are not a confirmed version."""
    start: int
    """Index of the first token."""
    end: int
    """Index after the last one."""


def number_of(weight_version: str) -> int:
    """Return the number of a version; 0 for weights that are not a confirmed version."""
    return int(weight_version) if weight_version.isascii() and weight_version.isdecimal() else 0


# In the scheduler


class _Noted:
    """The version of tokens that this process computes now, where SGLang does not note it."""

    version = 0


def follow_page(scheduler: Any) -> None:
    """Make the installed version the weight version of tokens that are computed from now on."""
    version, before = page().version, _Noted.version
    if SENT_BY_SGLANG:
        scheduler.record_weight_version_change(str(Label((version,))))
    elif before != version:
        _Noted.version = version
        batches = [batch for batch in (scheduler.running_batch, scheduler.last_batch) if batch is not None]
        inflight = [scheduler.chunked_req, *scheduler.waiting_queue, *(req for batch in batches for req in batch.reqs)]
        for req in {id(req): req for req in inflight if req is not None and req.output_ids}.values():
            req.__dict__.setdefault(_KEY, []).append((before, len(req.output_ids)))


def spans_of(changes: Sequence[tuple[int, int]], version: int, tokens: int) -> list[Span]:
    """Return the spans of a request's tokens.

    Args:
        changes: Each version before another one was installed, with the number of tokens that the request had then.
        version: The installed version.
        tokens: Number of tokens that the request has now.
    """
    spans: list[Span] = []
    for each, count in (*changes, (version, tokens)):
        end, start = min(count, tokens), spans[-1].end if spans else 0
        if end > start:
            spans.append(Span(each, start, end))
    return spans


class _Sent(NamedTuple):
    """In place of the list with an element for each token that SGLang slices: the part to send is all spans."""

    changes: Sequence[tuple[int, int]]
    version: int

    def __getitem__(self, part: Any) -> Any:
        return [tuple(span) for span in spans_of(self.changes, self.version, part.stop)]


def watch_sending() -> None:
    """Send spans with unfinished answers too."""
    kind = output_streamer._GenerationStreamAccumulator
    plain = kind.accept

    @functools.wraps(plain)
    def accept(self: Any, *, req: Any) -> None:
        before = len(self.weight_versions)
        plain(self, req=req)
        if len(self.weight_versions) > before and self.weight_versions[-1] is None:
            self.weight_versions[-1] = compute_weight_version_spans(
                req.weight_version_events, current_version=self.current_weight_version, num_output_tokens=len(req.output_ids)
            )

    @functools.wraps(plain)
    def accept_with_spans(self: Any, *, req: Any) -> None:
        sent = _Sent(getattr(req, _KEY, ()), _Noted.version)
        req.customized_info = {**(req.customized_info or {}), _KEY: sent}
        plain(self, req=req)

    kind.accept = accept if SENT_BY_SGLANG else accept_with_spans


# In the tokenizer manager


def received(output: Any) -> list[Sequence[Span]] | None:
    """Return the spans of each request of an output, taken out of it; None for an output without tokens.

    Args:
        output: SGLang's `BatchStrOutput`, `BatchTokenIDOutput` or `BatchEmbeddingOutput`.
    """
    if SENT_BY_SGLANG:
        found = getattr(output, "weight_versions", None)
        return found and [own(spans) for spans in found]
    info = unwrap_from_pickle(getattr(output, "customized_info", None)) or {}
    sent = info.pop(_KEY, None)
    if sent is None:
        return None
    output.customized_info = wrap_as_pickle(info or None)
    return [[Span(*span) for span in spans if span] for spans in sent]


def own(spans: Any) -> list[Span]:
    """Return SGLang's spans as the plugin's."""
    return [Span(number_of(span.version), span.start, span.end) for span in spans or ()]


def meta_info(found: Sequence[Span]) -> dict[str, Any]:
    """Return SGLang's entries of `meta_info` for a request's spans."""
    named = [{**span._asdict(), "version": str(Label((span.version,)))} for span in found]
    return {"weight_versions": named, "weight_version": named[-1]["version"]}
