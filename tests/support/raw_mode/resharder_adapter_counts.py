"""A vLLM plugin for tests: what adapters have in each worker, written to the file ADAPTER_COUNTS.RANK every 0.2 s."""

import json
import os
import threading
import time
from pathlib import Path


def register() -> None:
    if "ADAPTER_COUNTS" in os.environ:
        os.register_at_fork(after_in_child=start)  # workers may be forked from a process that has loaded its plugins
        start()


def start() -> None:
    if all(thread.name != "adapter-counts" for thread in threading.enumerate()):
        threading.Thread(target=write, args=(Path(os.environ["ADAPTER_COUNTS"]),), name="adapter-counts", daemon=True).start()


def write(file: Path) -> None:
    from resharder.client.inference.vllm.worker_rpc import ADAPTERS

    while True:
        time.sleep(0.2)
        for agents in list(ADAPTERS.values()):
            for agent in list(agents.values())[:1]:
                path = file.with_name(f"{file.name}.{agent.rank}")
                path.with_suffix(".new").write_text(json.dumps(counts(agent._slots._manager, agents.values())))
                path.with_suffix(".new").replace(path)


def counts(manager, agents):  # type: ignore[no-untyped-def]
    return {
        "slots": sum(id is not None for id in manager.lora_index_to_id),
        "active": len(manager._active_adapters),
        "registered": len(manager._registered_adapters),
        "pinned": len(manager._registered_adapters.pinned_items) + len(manager._active_adapters.pinned_items),
        "loaded": sum(len(agent._loaded) for agent in agents),
        "known": sum(len(agent._known) for agent in agents),
        "kinds": len(next(iter(agents))._writer._kinds),
    }
