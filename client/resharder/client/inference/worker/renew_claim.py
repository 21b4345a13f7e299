"""The helper process that renews the claim of a booting server: `python -m resharder.client.inference.worker.renew_claim PARENT`.

Loading weights, compiling and capturing graphs may keep Python's lock for longer than a lease, so a thread
of the worker could not renew it. The helper writes one line when it has started, and begins to renew when
it reads one. It ends with its parent, the worker, or when a control side has attached: from then on that
side's reports renew the lease.
"""

import sys
import time

from resharder.client.errors import ResharderError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker.reporter import claim
from resharder.client.rpc.channel import Channel
from resharder.client.runtime.parent_watch import end_with
from resharder.converters.failpoints import failpoint

_RETRY_SECONDS = 1.0  # after a failed renewal
_ANSWER_SECONDS = 5.0  # timeout of one renewal


def renew(channel: Channel, settings: PluginSettings) -> None:
    """Renew the claim until a control side has attached."""
    while True:
        pause = _RETRY_SECONDS
        try:
            failpoint("worker.boot.renew")
            answer = claim(channel, settings, boot=False, renews=True, patience=0, answer_seconds=_ANSWER_SECONDS)
            if answer.attached:
                return
            pause = answer.lease_seconds / 4
        except ResharderError:
            pass  # retried below
        time.sleep(pause)


def main() -> int:
    """Run the helper process."""
    end_with(int(sys.argv[1]))
    settings = PluginSettings.from_environment()
    print("up", flush=True)
    if sys.stdin.readline():
        with Channel(settings.endpoint) as channel:
            renew(channel, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
