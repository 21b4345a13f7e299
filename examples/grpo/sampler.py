"""Requests for samples to a vLLM server, in a thread beside the training."""

import contextlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.request import ProxyHandler, Request, build_opener

from examples.grpo.samples import Sample, oldest_adapter, read_answer

TIMEOUT = 600.0
"""Seconds, for a group of responses and for the start of the server."""


class Sampler:
    """Client of one server. Every sample has the same number of tokens, so that a batch is rectangular.

    Args:
        url: The server's.
        model: Name of the served model, or of an adapter on it.
        group: Responses to each prompt.
        length: Tokens of a response.
    """

    def __init__(self, url: str, model: str, group: int, length: int) -> None:
        self._url, self._model = url, model
        sampling = {"n": group, "temperature": 1.0, "max_tokens": length, "ignore_eos": True, "logprobs": 1}
        self._body = {"model": model, "sampling_params": sampling}
        self._opener = build_opener(ProxyHandler({}))  # the server is near: no proxy of the environment
        self._batches, self._requests = ThreadPoolExecutor(1), ThreadPoolExecutor(16)

    def wait_ready(self) -> None:
        """Wait until the server serves a version of the model. Raises TimeoutError."""
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            with contextlib.suppress(OSError), self._opener.open(f"{self._url}/v1/models", timeout=5) as answer:
                if self._model in [model["id"] for model in json.load(answer)["data"]]:
                    return
            time.sleep(0.2)
        raise TimeoutError(f"{self._url} does not serve {self._model} after {TIMEOUT:.0f} s")

    def start(self, prompts: Sequence[Sequence[int]]) -> Future[list[Sample]]:
        """Start to sample a group of responses to each prompt. The future raises OSError if the server does not answer."""
        return self._batches.submit(self._batch, prompts)

    def close(self) -> None:
        """End the threads. Batches that have not started are cancelled."""
        self._batches.shutdown(cancel_futures=True)
        self._requests.shutdown(cancel_futures=True)

    def _batch(self, prompts: Sequence[Sequence[int]]) -> list[Sample]:
        return [sample for group in self._requests.map(self._ask, prompts) for sample in group]

    def _ask(self, prompt: Sequence[int]) -> list[Sample]:
        body = json.dumps({**self._body, "token_ids": list(prompt)}).encode()
        request = Request(f"{self._url}/inference/v1/generate", body, {"Content-Type": "application/json"})
        with self._opener.open(request, timeout=TIMEOUT) as answer:
            return read_answer(prompt, json.load(answer), oldest_adapter(answer.headers["X-Resharder-Version"]))
