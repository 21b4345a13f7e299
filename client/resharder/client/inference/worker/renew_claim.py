"""The helper process that renews the claim of a booting server: `python -m resharder.client.inference.worker.renew_claim PARENT`.

Loading weights, compiling and capturing graphs may keep Python's lock for longer than a lease, so no thread of the worker can
renew it. The helper writes one line once it is up and begins to renew when it reads one. It ends with the worker that started
it, or when a control side has attached, whose reports renew the lease from then on.
"""

import sys
import time

from resharder.client.errors import ResharderError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.reporter import claim
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.parent_watch import end_with

_AGAIN_SECONDS = 1.0  # after a renewal that failed
_ANSWER_SECONDS = 5.0  # for one renewal


def renew(channel: Channel, settings: PluginSettings) -> None:
    """Returns once a control side has attached."""
    while True:
        pause = _AGAIN_SECONDS
        try:
            answer = claim(channel, settings, boot=False, renews=True, patience=0, answer_seconds=_ANSWER_SECONDS)
            if answer.attached:
                return
            pause = answer.lease_seconds / 4
        except ResharderError:
            pass  # the daemon may be back later
        time.sleep(pause)


def main() -> int:
    end_with(int(sys.argv[1]))
    settings = PluginSettings.from_environment()
    print("up", flush=True)
    if sys.stdin.readline():
        with Channel(settings.endpoint) as channel:
            renew(channel, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
