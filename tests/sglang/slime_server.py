"""SGLang's server as slime's engine starts it: no command, but a function in a process of its own.

Arguments are those of `sglang.launch_server`. With RESHARDER_TEST_SLIME, a checkout of slime, its own function does so.
"""

import ast
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import requests
from sglang.srt.server_args import ServerArgs, prepare_server_args

ENGINE = "slime/backends/sglang_utils/sglang_engine.py"


def own(checkout: Path) -> Any:
    """Return slime's `launch_server_process`, which waits until the server is healthy."""
    wanted = ("launch_server_process", "_wait_server_healthy")
    body = [node for node in ast.parse((checkout / ENGINE).read_text()).body if getattr(node, "name", "") in wanted]
    names = {"os": os, "time": time, "requests": requests, "multiprocessing": multiprocessing, "ServerArgs": ServerArgs}
    exec(compile(ast.Module(body, []), ENGINE, "exec"), names)
    return names["launch_server_process"]


def same(server_args: Any) -> Any:
    from sglang.srt.entrypoints.http_server import launch_server

    multiprocessing.set_start_method("spawn", force=True)
    process = multiprocessing.Process(target=launch_server, args=(server_args,))
    process.start()
    return process


if __name__ == "__main__":
    checkout = os.environ.get("RESHARDER_TEST_SLIME")
    launch = own(Path(checkout)) if checkout else same
    launch(prepare_server_args(sys.argv[1:])).join()
