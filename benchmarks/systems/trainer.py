"""The trainer process of a system in `benchmarks.compare`: `python -m benchmarks.systems.trainer NAME FOLDER SETUP`.

It answers the requests of `demo.jobs` in FOLDER: `fill` with a seed, `open` with the server's address, `publish`, `settle`.
"""

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.systems import SYSTEMS
from benchmarks.systems.base import Sender, Setup, System
from demo.jobs import answer, next_request


def carry_out(sender: Sender, asked: dict[str, Any]) -> dict[str, Any]:
    what = asked.pop("do")
    if what == "publish":
        began = time.time()
        version = sender.publish(asked["step"])
        return {"began": began, "returned": time.time(), "version": version}
    if what == "settle":
        return dict(sender.settle())
    if what == "fill":
        sender.fill(asked["seed"])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    elif what == "open":
        sender.open(asked["server"])
    return {}


def main() -> None:
    name, folder, setup = sys.argv[1], Path(sys.argv[2]), Setup(**json.loads(sys.argv[3]))
    system = SYSTEMS[name]
    assert isinstance(system, System)
    sender, number = system.sender(setup), 0
    while True:
        number += 1
        asked = next_request(folder, number)
        try:
            answer(folder, number, carry_out(sender, asked))
        except Exception as error:
            traceback.print_exc()
            answer(folder, number, {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
