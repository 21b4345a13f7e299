"""A vLLM worker while it boots, as a process: it claims as `--load-format resharder` does and loads for a long time.

python -m tests.vllm.booting_process [unrenewed]
"""

import ctypes
import sys

from resharder.client.channel import Channel
from resharder.client.vllm.renewal import Renewal
from resharder.client.vllm.report import claim
from resharder.client.vllm.settings import Settings


def main() -> None:
    settings, renews = Settings.from_environment(), "unrenewed" not in sys.argv
    renewal = Renewal() if renews else None
    claim(Channel(settings.endpoint), settings, boot=True, renews=renews, patience=10)
    if renewal is not None:
        renewal.begin()
    print("booting", flush=True)
    ctypes.PyDLL(None).sleep(600)  # with Python's lock held: no other thread of this process runs


if __name__ == "__main__":
    main()
