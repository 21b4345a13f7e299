"""prime-rl's orchestrator, which has a Resharder daemon update the servers; prime-rl 0.8.1.dev67.

prime-rl posts `/pause`, `/update_weights` with the folder of a checkpoint, and `/resume` to each server. Here the fleet moves to
the version of the same step between `/pause` and `/resume`. In place of `orchestrator @ orchestrator.toml`, with servers that
follow the daemon:

    export RESHARDER_ENDPOINT=127.0.0.1:7677 RESHARDER_MODEL=policy
    VLLM_PLUGINS=resharder VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_DIR --load-format resharder \\
        --weight-transfer-config '{"backend": "resharder"}' &
    python -m examples.prime_rl.orchestrator @ orchestrator.toml
"""

import asyncio
import os
from pathlib import Path
from typing import Any

from prime_rl.utils import client
from resharder.client import NotServed, Operator, went_well


def move(step: int) -> None:
    """Return when every server of the model serves the newest version of a step."""
    model = os.environ["RESHARDER_MODEL"]
    with Operator() as operator:
        version = next(version for version in operator.versions(model) if version.step == step)
        asked = operator.pin(model, version.number)
        fleet = operator.wait_moved(asked)
        if not went_well(asked, fleet):
            raise NotServed(f"{version.name} is not served: {fleet.reason}")


async def update_weights(admin_clients: list[Any], weight_dir: Path | None, lora_name: str | None = None, step: int = 0) -> None:
    """Have the servers generate with the weights of a policy version. Until they do, they are paused."""
    await client._pause_engines(admin_clients, step=step)
    try:
        await asyncio.to_thread(move, step)
    finally:
        await client._resume_engines(admin_clients)


client.update_weights = update_weights

if __name__ == "__main__":
    from prime_rl.entrypoints.orchestrator import main

    main()
