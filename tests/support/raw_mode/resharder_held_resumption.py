"""A vLLM plugin for tests: in the folder HELD_RESUMPTIONS, a resumption that has left its control side is on its way until the
file `go-PID` appears; `held-PID` says that it is, `ran` that the engine ran meanwhile."""

import asyncio
import os
from pathlib import Path


def register() -> None:
    if folder := os.environ.get("HELD_RESUMPTIONS"):
        hold(Path(folder))


def hold(folder: Path) -> None:
    from vllm.v1.engine.core_client import AsyncMPClient

    plain = AsyncMPClient._call_utility_async
    if hasattr(plain, "held"):
        return

    async def held(self, method, *args, **to):  # type: ignore[no-untyped-def]
        asked = args[1] if method == "resharder_fenced" else method
        if asked == "resume_scheduler":
            (folder / f"held-{os.getpid()}").touch()
            while not (folder / f"go-{os.getpid()}").exists():
                if not await plain(self, "is_scheduler_paused", **to):
                    (folder / "ran").touch()
                await asyncio.sleep(0.05)
        return await plain(self, method, *args, **to)

    held.held = True  # type: ignore[attr-defined]
    AsyncMPClient._call_utility_async = held
