"""Labels of answers with the versions that computed their tokens; read against 0.5.17 and 0.5.23.

Schedulers send the spans of each request with every output (`spans.py`). They are read where the tokenizer manager takes
outputs, for the answer of the task that began the request (`control/labels.py`).
"""

import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from resharder.client.inference.control import labels
from resharder.client.inference.control.labels import Label
from resharder.client.inference.sglang import spans
from resharder.client.inference.sglang.spans import Span, number_of
from resharder.client.inference.version_page import joined
from sglang.srt.managers import tokenizer_manager

_ATTRIBUTE, _SPANS = "resharder", "resharder_spans"  # of a `ReqState`


@dataclass
class _Request:
    """The attribute of a `ReqState`."""

    answer: labels.Answer
    tokens: int = 0
    """Number of tokens that are labelled."""
    waiting: Label = field(default_factory=Label)
    """Label of outputs that the request's task has not taken."""


def watch_outputs() -> None:
    """Label all further outputs of this process's tokenizer manager."""
    kind = tokenizer_manager.TokenizerManager
    if hasattr(kind._init_req_state, _ATTRIBUTE):
        return
    plain_init, plain_handle, plain_abort, plain_wait = (
        kind._init_req_state,
        kind._handle_batch_output,
        kind._handle_abort_req,
        kind._wait_one_response,
    )

    @functools.wraps(plain_init)
    def init_req_state(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        made = plain_init(self, obj, *args, **kwargs)
        if (answer := labels.current()) is not None:
            for rid in [obj.rid] if getattr(obj, "is_single", True) else obj.rid:
                self.rid_to_state[rid].resharder = _Request(answer)
        return made

    @functools.wraps(plain_handle)
    async def handle_batch_output(self: Any, received: Any) -> None:
        found, counts = spans.received(received), getattr(received, "completion_tokens", None)
        for i, rid in enumerate(received.rids):
            if found and not spans.SENT_BY_SGLANG and (state := self.rid_to_state.get(rid)) is not None:
                setattr(state, _SPANS, found[i])
            _note(self.rid_to_state.get(rid), found[i] if found else (), counts[i] if counts else None, self)
        await plain_handle(self, received)

    @functools.wraps(plain_abort)
    def handle_abort_req(self: Any, received: Any) -> None:
        state = self.rid_to_state.get(received.rid)
        _note(
            state, spans.own(getattr(received, "weight_versions", None)), len(state.output_ids) if state is not None else 0, self
        )
        plain_abort(self, received)

    @functools.wraps(plain_wait)
    def wait_one_response(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.rid_to_state.get(obj.rid)
        outputs = plain_wait(self, obj, *args, **kwargs)
        if not spans.SENT_BY_SGLANG:
            outputs = _with_spans(outputs, state)
        found: _Request | None = getattr(state, _ATTRIBUTE, None)
        return outputs if found is None else _taken(outputs, found)

    init_req_state.resharder = True  # type: ignore[attr-defined]
    kind._init_req_state, kind._handle_batch_output = init_req_state, handle_batch_output
    kind._handle_abort_req, kind._wait_one_response = handle_abort_req, wait_one_response


async def _taken(outputs: Any, request: _Request) -> AsyncIterator[Any]:
    """Yield the outputs of a request, with the label of each."""
    async for output in outputs:
        request.answer.took(id(request), request.waiting)
        request.waiting = Label()
        yield output


async def _with_spans(outputs: Any, state: Any) -> AsyncIterator[Any]:
    """Yield the outputs of a request with spans, as SGLang 0.5.23 does."""
    async for output in outputs:
        if found := getattr(state, _SPANS, None):
            output["meta_info"] |= spans.meta_info(found)
        yield output


def _note(state: Any, found: Sequence[Span], tokens: int | None, manager: Any) -> None:
    """Label the tokens of a request that are new since its last output; an output without tokens has the current version."""
    request: _Request | None = getattr(state, _ATTRIBUTE, None)
    if request is None:
        return
    if tokens is None:
        versions: tuple[int, ...] = (number_of(manager.config_value("weight_version")),)
    else:
        versions = joined(list(new_versions(found, request.tokens, tokens)))
        request.tokens = max(request.tokens, tokens)
    if versions:
        request.answer.made(Label(versions))
        request.waiting += Label(versions)


def new_versions(found: Sequence[Span], since: int, until: int) -> Iterator[int]:
    """Yield the versions of a request's tokens from `since` to before `until`, in order.

    Args:
        found: The spans of all tokens of the request.
        since: Index of the first token.
        until: Index after the last one.
    """
    for span in found:
        if max(span.start, since) < min(span.end, until):
            yield span.version
