"""Hooks into vLLM that say by which versions its outputs were computed; read against 0.26, 0.28 and 0.32.

Answers are labelled in the process that has the engine's client. The engine core records when each step's outputs were
computed (`EngineCoreOutputs.timestamp`, `v1/engine/__init__.py`), and `AsyncLLM` passes the time to
`process_outputs`. An engine core on this host shares this process's clock. For one on another host, a token
is labelled with every version that was installed between the arrival of its request and its own arrival.

vLLM's own weight version is one of the engine core, `default` at first (`_weight_version`, `v1/engine/core.py`). It
returns it for `/weight_info`, and from 0.32 on stamps the outputs of every step with it, from which token-in-token-out
answers get their spans (`weight_versions`). The workers write what they have installed to the
page (`version_page.py`), only while the engine is paused, so the page's version at the end of a step is
that of the step's tokens. Boots, installs, rollbacks and dropped weights need no call of their own, and
engine cores and API servers cannot disagree.

A request for an adapter is computed with the version that it names. An install that cuts requests over (pause modes KEEP and
ABORT) writes its version to the adapter's second page (`cut_page`), between two steps: later tokens are that version's.
"""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from resharder.client.inference.control import labels
from resharder.client.inference.control.labels import Label
from resharder.client.inference.version_page import Journal, Page, cut_page, joined, page
from resharder.client.inference.vllm import adapter_ids

_ATTRIBUTE = "resharder"  # on vLLM's objects
_STAMP = "_attach_weight_version"
_WARNED = "_resharder_page_unreadable"
logger = logging.getLogger("vllm.resharder.weight_version")


@dataclass
class _Source:
    """The attribute of an `OutputProcessor`."""

    page: Page
    one_clock: bool
    """Whether all engine cores run on this host."""
    clock: Callable[[], float]

    def label(self, computed: float | None, request: "_Request") -> Label:
        """Return the label of a request's tokens that were computed at `computed`."""
        now = self.clock()
        known = self.one_clock and computed is not None and request.arrived <= computed <= now
        since, until = (computed, computed) if known and computed is not None else (request.arrived, now)
        versions = self.page.read().between(since, until)
        if request.adapter is None:
            return Label(versions)
        name, version = request.adapter
        cuts = cut_page(name).read()
        return Label(versions, tuple((name, made) for made in cut_versions(cuts, version, request.arrived, until, exact=known)))


def cut_versions(cuts: Journal, version: int, arrived: float, until: float, *, exact: bool) -> tuple[int, ...]:
    """Return the versions of an adapter that computed tokens of a request.

    Args:
        cuts: The adapter's second page.
        version: The version in service at `arrived`, when the request named it.
        arrived: Monotonic time.
        until: When the tokens were computed or, if that is not known, when they were received.
        exact: Whether `until` is when they were computed.
    """
    if exact and [cut for at, cut in cuts.changes if at <= until][-1:] == [0]:
        return (0,)  # engines are cut over one after the other
    found = joined([version], [cut for at, cut in cuts.changes if arrived < at <= until and cut > 0])
    return found[-1:] if exact else found


@dataclass
class _Request:
    """The attribute of a `RequestState`."""

    answer: labels.Answer
    arrived: float
    """Monotonic time of the request's arrival."""
    adapter: tuple[str, int] | None
    """The adapter that it names, and the version of it that was in service then."""
    waiting: Label = field(default_factory=Label)
    """Label of tokens that are not in an output yet."""


@dataclass
class _Queue:
    """The attribute of a `RequestOutputCollector`."""

    answer: labels.Answer
    ready: Label = field(default_factory=Label)
    """Label of tokens in no output yet: parallel answers of a request come in one."""


def watch_outputs(processor: Any, page: Page, *, one_clock: bool, clock: Callable[[], float] = time.monotonic) -> None:
    """Label all further outputs of a processor.

    Args:
        processor: vLLM's `OutputProcessor`.
        page: The server's page.
        one_clock: Whether all engine cores run on this host, so that their times are comparable.
        clock: Returns the monotonic time of this host, in seconds.
    """
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

    setattr(processor, _ATTRIBUTE, _Source(page, one_clock, clock))
    if hasattr(OutputProcessor.add_request, _ATTRIBUTE):
        return
    _wrap(OutputProcessor, "add_request", _add_request)
    _wrap(OutputProcessor, "process_outputs", _process_outputs)
    _wrap(RequestState, "_new_completion_output", _new_completion_output)
    _wrap(RequestState, "make_request_output", _make_request_output)
    _wrap(RequestOutput, "add", _add_output)
    _wrap(RequestOutputCollector, "get_nowait", _get_nowait)
    _wrap(RequestOutputCollector, "get", _get)


def _wrap(kind: Any, method: str, around: Callable[..., Any]) -> None:
    plain = getattr(kind, method)

    @functools.wraps(plain)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, plain, *args, **kwargs)

    wrapped.resharder = True  # type: ignore[attr-defined]
    setattr(kind, method, wrapped)


def _add_request(processor: Any, plain: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    source: _Source | None = getattr(processor, _ATTRIBUTE, None)
    clock, adapter = source.clock if source is not None else time.monotonic, None
    arrived, lora = clock(), getattr(request, "lora_request", None)
    if adapter_ids.is_ours(lora):
        request.lora_request, arrived = _in_service(lora, clock)
        adapter = adapter_ids.adapter_of(lora), adapter_ids.version_of(request.lora_request)
    result = plain(processor, request, *args, **kwargs)
    state, answer = processor.request_states.get(request.request_id), labels.current()
    if state is not None and adapter_ids.is_ours(lora):  # vLLM's metrics keep each name for ever
        state.lora_name = adapter_ids.adapter_of(lora)
    if source is not None and state is not None and answer is not None and not hasattr(state, _ATTRIBUTE):
        state.resharder = _Request(answer, arrived, adapter)
        if state.queue is not None and not hasattr(state.queue, _ATTRIBUTE):
            state.queue.resharder = _Queue(answer)
    return result


def _in_service(lora: Any, clock: Callable[[], float]) -> tuple[Any, float]:
    """Return the `LoRARequest` of the adapter's version in service, and a time at which it was.

    The version that `lora` names may have been superseded while the prompt was read.
    """
    found = page(adapter_ids.adapter_of(lora))
    while True:
        journal, at = found.read(), clock()
        if found.read() == journal:
            return adapter_ids.renewed(lora, journal.last), at


def _process_outputs(processor: Any, plain: Any, outputs: Any, timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
    source: _Source | None = getattr(processor, _ATTRIBUTE, None)
    for output in outputs if source is not None else ():
        request: _Request | None = getattr(processor.request_states.get(output.request_id), _ATTRIBUTE, None)
        if request is not None and source is not None and (output.new_token_ids or output.pooling_output is not None):
            label = source.label(timestamp, request)
            request.answer.made(label)
            request.waiting += label
    return plain(processor, outputs, timestamp, *args, **kwargs)


def _new_completion_output(state: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Move the waiting label to the queue: whether its next output has these tokens, vLLM decides after this."""
    request, queue = getattr(state, _ATTRIBUTE, None), getattr(state.queue, _ATTRIBUTE, None)
    if request is not None and queue is not None:
        queue.ready, request.waiting = queue.ready + request.waiting, Label()
    return plain(state, *args, **kwargs)


def _make_request_output(state: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Move the queue's label to the new output: a queue may keep outputs apart until they are taken (0.33)."""
    output, queue = plain(state, *args, **kwargs), getattr(state.queue, _ATTRIBUTE, None)
    if output is not None and queue is not None:
        output.resharder, queue.ready = queue.ready, Label()
    return output


def _add_output(output: Any, plain: Any, later: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the labels of both outputs where vLLM makes them one."""
    if label := getattr(output, _ATTRIBUTE, Label()) + getattr(later, _ATTRIBUTE, Label()):
        output.resharder = label
    return plain(output, later, *args, **kwargs)


def _get_nowait(collector: Any, plain: Any) -> Any:
    output = plain(collector)
    if output is not None:
        _took(collector, output)
    return output


async def _get(collector: Any, plain: Any) -> Any:
    output = await plain(collector)
    _took(collector, output)
    return output


def _took(collector: Any, output: Any) -> None:
    queue: _Queue | None = getattr(collector, _ATTRIBUTE, None)
    if queue is not None:
        queue.answer.took(id(queue), getattr(output, _ATTRIBUTE, Label()))


def watch_weight_version() -> None:
    """Make the engine core's weight version that of `X-Resharder-Version`."""
    from vllm.v1.engine.core import EngineCore

    follow_page(EngineCore)


def follow_page(core: Any) -> None:
    """Make a class of engine cores take its weight version from the page; before 0.32 it stamps no outputs."""
    for method in ("get_weight_version", _STAMP):
        if (plain := getattr(core, method, None)) is not None and not hasattr(plain, "resharder"):
            _precede(core, method)


def _precede(core: Any, method: str) -> None:
    plain = getattr(core, method)

    @functools.wraps(plain)
    def preceded(self: Any, *args: Any) -> Any:
        self.set_weight_version(_installed(self))
        return plain(self, *args)

    preceded.resharder = True  # type: ignore[attr-defined]
    setattr(core, method, preceded)


def _installed(core: Any) -> str:
    """Return the label of the installed version; `none` if the page cannot be read."""
    try:
        return str(Label((page().version,)))
    except OSError as error:
        if not hasattr(core, _WARNED):
            setattr(core, _WARNED, True)
            logger.warning("cannot read the server's versions: %s", error)
        return str(Label((0,)))
