"""A vLLM worker while it boots, as a process: it claims as `--load-format resharder` does and loads for a long time.

python -m tests.vllm.booting_process [unrenewed]
"""

import ctypes
import sys

from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.claim import Renewal, claim
from resharder.client.rpc.channel import Channel


def main() -> None:
    settings, renews = PluginSettings.from_environment(), "unrenewed" not in sys.argv
    renewal = Renewal() if renews else None
    claim(Channel(settings.endpoint), settings, boot=True, renews=renews, patience=10)
    if renewal is not None:
        renewal.begin()
    print("booting", flush=True)
    ctypes.PyDLL(None).sleep(600)  # with Python's lock held: no other thread of this process runs


if __name__ == "__main__":
    main()
