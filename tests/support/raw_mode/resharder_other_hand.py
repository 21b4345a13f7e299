"""A vLLM plugin for tests: another hand in every worker, which changes a weight behind everybody's back.

It changes one element of the tensor whose path is in the file named by OTHER_HAND, whenever that file has another line, and then
writes that line to OTHER_HAND.RANK. A line is `NUMBER RANK PATH`; workers of other ranks leave it alone. With the name of an
adapter in place of a path, it changes a tensor of the adapter's slot.
"""

import os
import threading
import time
from pathlib import Path


def register() -> None:
    if "OTHER_HAND" in os.environ:
        os.register_at_fork(after_in_child=start)  # workers may be forked from a process that has loaded its plugins
        start()


def start() -> None:
    if all(thread.name != "other-hand" for thread in threading.enumerate()):
        threading.Thread(target=watch, args=(Path(os.environ["OTHER_HAND"]),), name="other-hand", daemon=True).start()


def watch(file: Path) -> None:
    done = ""
    while True:
        time.sleep(0.05)
        line = file.read_text() if file.exists() else ""
        if line and line != done and change(file, line):
            done = line


def change(file: Path, line: str) -> bool:
    from resharder.client.inference.vllm.worker_rpc import ADAPTERS, AGENTS
    from resharder.client.inference.worker.memory import live_tensors

    _, rank, path = line.split()
    for model, agent in list(AGENTS.items()):
        if agent.host.rank != int(rank):
            continue
        if adapter := ADAPTERS.get(model, {}).get(path):
            tensor = next(iter(adapter._slots.read(adapter._current.slot).values()))
        else:
            tensor = live_tensors(model)[path]
        tensor.detach().view(-1)[3] += 1
        file.with_name(f"{file.name}.{agent.host.rank}").write_text(line)
    return bool(len(AGENTS))
