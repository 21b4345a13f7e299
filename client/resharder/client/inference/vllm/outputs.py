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
"""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from resharder.client.inference.control import labels
from resharder.client.inference.version_page import Page, joined, page
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

    def versions(self, computed: float | None, arrived: float) -> tuple[int, ...]:
        """Return the versions of tokens that were computed at `computed` for a request that arrived at `arrived`."""
        now = self.clock()
        if self.one_clock and computed is not None and arrived <= computed <= now:
            return self.page.read().between(computed, computed)
        return self.page.read().between(arrived, now)


@dataclass
class _Request:
    """The attribute of a `RequestState`."""

    answer: labels.Answer
    arrived: float
    """Monotonic time of the request's arrival."""
    waiting: tuple[int, ...] = ()
    """Versions of tokens that are not in an output yet."""


@dataclass
class _Queue:
    """The attribute of a `RequestOutputCollector`."""

    answer: labels.Answer
    ready: tuple[int, ...] = ()
    """Versions of tokens in no output yet: parallel answers of a request come in one."""


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
    if adapter_ids.is_ours(
        lora := getattr(request, "lora_request", None)
    ):  # it may have been superseded while the prompt was read
        request.lora_request = adapter_ids.renewed(lora, page(adapter_ids.adapter_of(lora)).read().last)
    result = plain(processor, request, *args, **kwargs)
    source: _Source | None = getattr(processor, _ATTRIBUTE, None)
    state, answer = processor.request_states.get(request.request_id), labels.current()
    if state is not None and adapter_ids.is_ours(lora):  # vLLM's metrics keep each name for ever
        state.lora_name = adapter_ids.adapter_of(lora)
    if source is not None and state is not None and answer is not None and not hasattr(state, _ATTRIBUTE):
        state.resharder = _Request(answer, source.clock())
        if adapter := adapter_ids.label_of(getattr(request, "lora_request", None)):
            answer.adapted(adapter)
        if state.queue is not None and not hasattr(state.queue, _ATTRIBUTE):
            state.queue.resharder = _Queue(answer)
    return result


def _process_outputs(processor: Any, plain: Any, outputs: Any, timestamp: float | None = None, *args: Any, **kwargs: Any) -> Any:
    source: _Source | None = getattr(processor, _ATTRIBUTE, None)
    for output in outputs if source is not None else ():
        request: _Request | None = getattr(processor.request_states.get(output.request_id), _ATTRIBUTE, None)
        if request is not None and source is not None and (output.new_token_ids or output.pooling_output is not None):
            versions = source.versions(timestamp, request.arrived)
            request.answer.made(versions)
            request.waiting = joined(request.waiting, versions)
    return plain(processor, outputs, timestamp, *args, **kwargs)


def _new_completion_output(state: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Move the waiting versions to the queue: whether its next output has these tokens, vLLM decides after this."""
    request, queue = getattr(state, _ATTRIBUTE, None), getattr(state.queue, _ATTRIBUTE, None)
    if request is not None and queue is not None:
        queue.ready, request.waiting = joined(queue.ready, request.waiting), ()
    return plain(state, *args, **kwargs)


def _make_request_output(state: Any, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Move the queue's versions to the new output: a queue may keep outputs apart until they are taken (0.33)."""
    output, queue = plain(state, *args, **kwargs), getattr(state.queue, _ATTRIBUTE, None)
    if output is not None and queue is not None:
        output.resharder, queue.ready = queue.ready, ()
    return output


def _add_output(output: Any, plain: Any, later: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the versions of both outputs where vLLM makes them one."""
    if versions := joined(getattr(output, _ATTRIBUTE, ()), getattr(later, _ATTRIBUTE, ())):
        output.resharder = versions
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
        queue.answer.took(id(queue), getattr(output, _ATTRIBUTE, ()))


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
        return labels.name((page().version,))
    except OSError as error:
        if not hasattr(core, _WARNED):
            setattr(core, _WARNED, True)
            logger.warning("cannot read the server's versions: %s", error)
        return labels.name((0,))
