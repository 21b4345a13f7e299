"""vLLM's own output processor, given outputs as the engine core makes them: each token is labelled by the time it was made."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from resharder.client.inference.control.labels import Answer, Label, answering
from resharder.client.inference.version_page import OWN, Page
from resharder.client.inference.vllm.adapter_ids import request_of
from resharder.client.inference.vllm.outputs import cut_versions, watch_outputs
from resharder.client.inference.worker.adapter_agent import adapter_id
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

pytestmark = pytest.mark.compat("labels")


class Apart(RequestOutputCollector):
    """Keeps outputs apart that are not taken yet, as that of vLLM 0.33 for streamed inputs keeps those of two inputs."""

    def __init__(self, kind: RequestOutputKind, name: str) -> None:
        super().__init__(kind, name)
        self.backlog = deque[RequestOutput]()

    def put(self, output: RequestOutput) -> None:
        if self.output is None:
            super().put(output)
        else:
            self.backlog.append(output)

    async def get(self) -> RequestOutput:
        return self._next(await super().get())

    def get_nowait(self) -> RequestOutput | None:
        return self._next(super().get_nowait())

    def _next(self, output: RequestOutput | None) -> RequestOutput | None:
        if self.backlog:
            self.output = self.backlog.popleft()
            self.ready.set()
        return output


class Scene:
    """Version 11 is installed when it begins, and 12 from `changed` on; the clock moves where a test sets `now`."""

    began, changed, later = 1000.0, 1002.0, 1003.0

    def __init__(self, folder: Path, *, one_clock: bool = True, stream_interval: int = 1) -> None:
        self.now = self.began
        times = [self.began - 1, self.changed - 0.001, self.changed]
        page = Page(folder / "page", clock=lambda: times.pop(0))
        for version in (11, 0, 12):
            page.write(0, version)
        self.processor = OutputProcessor(None, log_stats=False, stream_interval=stream_interval)
        watch_outputs(self.processor, page, one_clock=one_clock, clock=lambda: self.now)

    def add(
        self, name: str, kind: RequestOutputKind, n: int = 1, collector: type[RequestOutputCollector] = RequestOutputCollector
    ) -> RequestOutputCollector:
        params = SamplingParams(output_kind=kind, detokenize=False, n=n)
        request = EngineCoreRequest(name, [1], None, params, None, 0.0, None, None, None, external_req_id=name)
        queue = collector(kind, name)
        if n == 1:
            self.processor.add_request(request, None, None, 0, queue)
            return queue
        parent = ParentRequest(request)
        for index in range(n):
            child_id, child_params = parent.get_child_info(index)
            child = EngineCoreRequest(child_id, [1], None, child_params, None, 0.0, None, None, None, external_req_id=name)
            self.processor.add_request(child, None, parent, index, queue)
        return queue

    def step(self, at: float, *names: str, last: bool = False) -> None:
        reason = FinishReason.LENGTH if last else None
        self.processor.process_outputs([EngineCoreOutput(name, [5], finish_reason=reason) for name in names], at)


@contextmanager
def sending() -> Iterator[Answer]:
    with answering() as answer:
        answer.sends_from_here()
        yield answer


def test_tokens_that_are_read_late_are_labelled_by_when_they_were_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path)
        with answering() as whole:
            scene.add("whole", RequestOutputKind.FINAL_ONLY)
        with answering() as several:
            scene.add("several", RequestOutputKind.FINAL_ONLY, n=2)
        with answering() as late:
            scene.add("late", RequestOutputKind.FINAL_ONLY)
        scene.now = scene.later
        scene.step(scene.began + 0.01, "whole", "0_several", "1_several")
        assert (whole.versions, several.versions, late.versions) == ((11,), (11,), ())
        scene.step(scene.changed + 0.01, "whole", "1_several", "late", last=True)
        assert (whole.versions, several.versions, late.versions) == ((11, 12), (11, 12), (12,))

    asyncio.run(scenario())


@pytest.mark.parametrize("interval", [1, 2])
def test_what_is_taken_from_a_stream_is_labelled_with_the_versions_of_the_tokens_in_it(tmp_path: Path, interval: int) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path, stream_interval=interval)
        with sending() as answer:
            queue = scene.add("stream", RequestOutputKind.DELTA)
            scene.now = scene.later
            scene.step(scene.began + 0.005, "stream")
            await queue.get()
            scene.step(scene.began + 0.01, "stream")
            assert answer.sent() == Label((11,)), "what was not taken yet is in no event"
            if interval == 1:
                await queue.get()
            scene.step(scene.changed + 0.01, "stream")
            assert answer.sent() == Label((11,))
            output = queue.get_nowait()
            assert output is not None
            expected = {1: ((12,), 1), 2: ((11, 12), 2)}[interval]
            assert (answer.sent().versions, len(output.outputs[0].token_ids)) == expected

    asyncio.run(scenario())


def test_outputs_that_a_queue_keeps_apart_are_labelled_when_each_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path)
        with sending() as answer:
            queue = scene.add("stream", RequestOutputKind.DELTA, collector=Apart)
            scene.now = scene.later
            for at in (scene.began + 0.01, scene.changed + 0.01):
                scene.step(at, "stream")
            for _ in range(2):
                await queue.get()
                labels.append(answer.sent().versions)

    labels: list[tuple[int, ...]] = []
    asyncio.run(scenario())
    assert labels == [(11,), (12,)]


def test_where_the_engines_clock_is_another_one_every_version_that_was_installed_meanwhile_is_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path, one_clock=False)
        with answering() as over:
            scene.add("over", RequestOutputKind.FINAL_ONLY)
        scene.now = scene.later
        with answering() as after:
            scene.add("after", RequestOutputKind.FINAL_ONLY)
        scene.step(scene.began + 0.01, "over", "after", last=True)
        assert (over.versions, after.versions) == ((11, 0, 12), (12,))

    asyncio.run(scenario())


def test_requests_that_belong_to_no_answer_pass_as_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        scene = Scene(tmp_path)
        queue = scene.add("plain", RequestOutputKind.DELTA)
        scene.step(scene.began, "plain", last=True)
        output = await queue.get()
        assert (output.finished, list(output.outputs[0].token_ids)) == (True, [5])

    asyncio.run(scenario())


def test_a_token_of_an_adapter_is_of_the_version_that_its_request_names_or_was_cut_over_to_before(tmp_path: Path) -> None:
    times = [0.0, 0.0, 10.0, 10.0, 20.0, 20.5, 30.0, 30.0]
    page = Page(tmp_path / "page", clock=lambda: times.pop(0))
    for cut in (OWN, 2, OWN, 4):
        for rank in (0, 1):
            page.write(rank, cut)
    cuts = page.read()
    named_first = [cut_versions(cuts, 1, 5.0, until, exact=True) for until in (6.0, 10.0, 19.0, 20.2, 25.0, 31.0)]
    assert named_first == [(1,), (2,), (2,), (0,), (2,), (4,)]
    assert cut_versions(cuts, 3, 25.0, 29.0, exact=True) == (3,)
    assert cut_versions(cuts, 1, 5.0, 31.0, exact=False) == (1, 2, 4)


def test_vllms_statistics_know_an_adapter_by_its_name_and_its_caches_by_the_version(tmp_path: Path, own_page: None) -> None:
    (tmp_path / "scene").mkdir()
    processor, params = Scene(tmp_path / "scene").processor, SamplingParams(detokenize=False)
    adapter = request_of("lora", adapter_id(0, 4), 4)
    request = EngineCoreRequest("r", [1], None, params, None, 0.0, adapter, None, None, external_req_id="r")
    processor.add_request(request, None, None, 0, RequestOutputCollector(params.output_kind, "r"))
    assert processor.request_states["r"].lora_name == "lora"
    assert request.lora_request is not None
    assert request.lora_request.lora_name == "lora@4"
