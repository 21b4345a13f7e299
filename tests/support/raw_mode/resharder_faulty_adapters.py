"""A vLLM plugin for tests: the worker of RANK cannot enter VERSION while the file FAULTY_ADAPTERS has `RANK VERSION`."""

import os
from pathlib import Path


def register() -> None:
    from resharder.client.inference.vllm.lora import LoraSlots

    if "FAULTY_ADAPTERS" in os.environ and LoraSlots.enter.__name__ == "enter":
        LoraSlots.enter = faulty(LoraSlots.enter)


def faulty(enter):  # type: ignore[no-untyped-def]
    def faulty_enter(slots, id, adapter):  # type: ignore[no-untyped-def]
        from vllm.distributed import get_tensor_model_parallel_rank

        file = Path(os.environ["FAULTY_ADAPTERS"])
        if file.exists() and file.read_text().split() == [str(get_tensor_model_parallel_rank()), str(id % 1_000_000)]:
            raise RuntimeError("the test lets it fail")
        enter(slots, id, adapter)

    return faulty_enter
