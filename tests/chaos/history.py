"""History of a run: one JSON object a line, in the order in which things were seen, with seconds since the start.

| kind | fields |
|---|---|
| run | `servers`, `nodes`, `replicas`, `security`: what the run has |
| begin, end | `id`, `name`, `given`; `outcome` (`ok` or a reason), `text`, `result`: an operation |
| fault | `name`, `target`, `given` |
| alone | `nodes`, `versions`: nodes that were killed, and versions that were on them alone |
| start, ready, death | `process`, `failpoint`, `status` |
| answer | `client`, `server`, `began`, `versions`, `made`: for each version, which tokens it made |
| turned | `client`, `server`, `began`, `status`, `reason`: a request without an answer |
| version, fleet, server, node | changes in the daemon's answers to an observer; `asked`, `before`: this poll and the one before |
| region | `what` (`ready`, `served`), `number`; `step`, `epoch`, `fingerprint`, `same`: whether it has the weights of its step |
| page | `path`, `status`, `text`: an answer of the daemon's web port that is not 200; status 0 for none |
| intrusion | `what`, `party`, `outcome`: a call that no role permits |
| links | `plain`: by link, how many connections were without TLS, as seen in peace |
| moved | `node`, `daemon`, `peers`: bytes that a node received from the daemon and from nodes since it began, as seen in peace |
| peace | `phase` (`begin`, `arrived`, `end`), `left`: resources that remain |
| log | `process`, `text`: a fault of its own in a process's log |
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class History:
    """Thread-safe record of a run, also written to a file."""

    def __init__(self, file: Path) -> None:
        self.file, self.events = file, list[Event]()
        self._began, self._lock = time.monotonic(), threading.Lock()
        self._out = file.open("a")

    @property
    def now(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self._began

    def record(self, kind: str, **fields: Any) -> Event:
        """Append an event with the present time."""
        with self._lock:
            event = {"t": round(self.now, 3), "kind": kind, **fields}
            self.events.append(event)
            self._out.write(json.dumps(event) + "\n")
            self._out.flush()
        return event

    def close(self) -> None:
        """Close the file."""
        self._out.close()


def read(file: Path) -> list[Event]:
    """Return the events of a history file."""
    return list(_lines(file))


def _lines(file: Path) -> Iterator[Event]:
    with file.open() as lines:
        for line in lines:
            yield json.loads(line)
