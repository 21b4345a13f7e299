"""Labels of answers with the versions that computed their tokens, from SGLang's own spans; read against 0.5.23.

A scheduler notes for each request at which token the weight version changed (`utils/weight_versions.py`). The plugin has it send
these spans with every output (`scheduler.py`). They are read where the tokenizer manager takes outputs, for the answer of the
task that began the request (`control/labels.py`).
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from resharder.client.inference.control import labels
from resharder.client.inference.control.labels import Label
from resharder.client.inference.version_page import joined
from sglang.srt.managers import tokenizer_manager

_ATTRIBUTE = "resharder"  # of a `ReqState`


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
    plain_init, plain_handle, plain_abort, plain_stream = (
        kind._init_req_state,
        kind._handle_batch_output,
        kind._handle_abort_req,
        kind._stream_one_response,
    )

    @functools.wraps(plain_init)
    def init_req_state(self: Any, obj: Any, request: Any = None) -> None:
        plain_init(self, obj, request)
        if (answer := labels.current()) is not None:
            for rid in [obj.rid] if getattr(obj, "is_single", True) else obj.rid:
                self.rid_to_state[rid].resharder = _Request(answer)

    @functools.wraps(plain_handle)
    async def handle_batch_output(self: Any, received: Any) -> None:
        spans, counts = getattr(received, "weight_versions", None), getattr(received, "completion_tokens", None)
        for i, rid in enumerate(received.rids):
            _note(self.rid_to_state.get(rid), spans[i] if spans else None, counts[i] if counts else None, self)
        await plain_handle(self, received)

    @functools.wraps(plain_abort)
    def handle_abort_req(self: Any, received: Any) -> None:
        state = self.rid_to_state.get(received.rid)
        _note(state, received.weight_versions, len(state.output_ids) if state is not None else 0, self)
        plain_abort(self, received)

    @functools.wraps(plain_stream)
    async def stream_one_response(self: Any, obj: Any, state: Any, request: Any = None) -> Any:
        found: _Request | None = getattr(state, _ATTRIBUTE, None)
        async for output in plain_stream(self, obj=obj, state=state, request=request):
            if found is not None:
                found.answer.took(id(state), found.waiting)
                found.waiting = Label()
            yield output

    init_req_state.resharder = True  # type: ignore[attr-defined]
    kind._init_req_state, kind._handle_batch_output = init_req_state, handle_batch_output
    kind._handle_abort_req, kind._stream_one_response = handle_abort_req, stream_one_response


def _note(state: Any, spans: Any, tokens: int | None, manager: Any) -> None:
    """Label the tokens of a request that are new since its last output; an output without tokens has the current version."""
    request: _Request | None = getattr(state, _ATTRIBUTE, None)
    if request is None:
        return
    if tokens is None:
        versions: tuple[int, ...] = (number_of(manager.config_value("weight_version")),)
    else:
        versions = joined(list(new_versions(spans or (), request.tokens, tokens)))
        request.tokens = max(request.tokens, tokens)
    if versions:
        request.answer.made(Label(versions))
        request.waiting += Label(versions)


def new_versions(spans: Any, since: int, until: int) -> Iterator[int]:
    """Yield the versions of a request's tokens from `since` to before `until`, in order.

    Args:
        spans: SGLang's spans of all tokens of the request: `version`, `start` and `end`.
        since: Index of the first token.
        until: Index after the last one.
    """
    for span in spans:
        if max(span.start, since) < min(span.end, until):
            yield number_of(span.version)


def number_of(weight_version: str) -> int:
    """Return the number of a version; 0 for weights that are not a confirmed version."""
    return int(weight_version) if weight_version.isascii() and weight_version.isdecimal() else 0
