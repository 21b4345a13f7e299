"""A vLLM plugin for tests: sleep on the CPU, where vLLM's own does nothing, loses what it loses on a GPU.

What the model and its drafter read, and adapters, is overwritten with ones: NaN to floats, -1 to integers. Level 1 brings back
all of it, level 2 the model's buffers alone, as Worker.sleep in v1/worker/gpu_worker.py of vLLM 0.26 does.
"""


def register() -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def sleep(worker, level=1):  # type: ignore[no-untyped-def]
    weights = [memory_of(tensor) for tensor in read(worker)]
    buffers = [memory_of(buffer) for buffer in worker.get_model().buffers()]
    worker.saved = [(memory, memory.clone()) for memory in (buffers if level == 2 else weights)]
    for memory in weights:
        memory.fill_(255)


def wake_up(worker, tags=None):  # type: ignore[no-untyped-def]
    if tags is None or "weights" in tags:
        for memory, saved in worker.saved:
            memory.copy_(saved)


def read(worker):  # type: ignore[no-untyped-def]
    from resharder.client.inference.recording import inventory, places
    from resharder.client.inference.vllm.drafters import drafter_of

    for model in filter(None, (worker.get_model(), drafter_of(worker))):
        notes = inventory.NOTES[model]
        for found in inventory.reachable(model):
            address = found.path.endswith("handler_tensor")  # of packed weights, which are out of reach
            if not address and (found.parameter or found.path in notes.constant or found.path in notes.made):
                yield found.tensor
        yield from places.adapter_tensors(model)


def memory_of(tensor):  # type: ignore[no-untyped-def]
    import torch

    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
