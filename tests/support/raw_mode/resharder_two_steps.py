"""A vLLM plugin for tests: two steps are in progress at a time on a CPU, as with asynchronous scheduling on a GPU.

The engine core gets a batch queue, so that the tokens of a step are delivered after the next one has begun.
"""


def register() -> None:
    from vllm.config import VllmConfig

    VllmConfig.max_concurrent_batches = property(lambda config: 2)
