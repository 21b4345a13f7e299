"""Storms of faults over real processes: `python -m tests.chaos --minutes M --seed S [--storm SECONDS] [--server NAME]`.

The seed determines the schedules, and whether the run has security and how many replicas; `--security`,
`--no-security` and `--replicas` take the place of what it has.

Prints what was done and every violation; a failing run keeps its folder with the history and the logs of all processes. With
`--check FILE` the history of an earlier run is checked again.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos.history import read
from tests.chaos.model import check
from tests.chaos.run import EXPECTED
from tests.chaos.schedule import SERVERS, draw, setting_of
from tests.chaos.storm import Result, Storms
from tests.chaos.violations import is_lost, short_of_holders
from tests.chaos.violations import published as published_in
from tests.support.hidden import unavailable
from tests.support.supervised import record_folder


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.5, help="time of storms and peace after all servers are ready")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--storm", type=float, default=60.0, help="seconds of one storm")
    parser.add_argument("--server", choices=SERVERS, help="run with this server only")
    parser.add_argument("--boots", type=int, default=1, help="kills of servers, and of the trainer, in one storm")
    parser.add_argument("--replicas", type=int, choices=(1, 2, 3), help="the daemon's replicas, in place of those of the seed")
    security = argparse.BooleanOptionalAction
    parser.add_argument(
        "--security", action=security, help="certificates and roles for all, or not, in place of what the seed has"
    )
    parser.add_argument("--adapters", action=security, help="an adapter beside the model, or none, in place of what the seed has")
    parser.add_argument("--sglang", action="store_true", help="`left` is a server of SGLang, in the venv of make test-sglang")
    parser.add_argument(
        "--region", action="store_true", help="a daemon in another region follows the archive, in a bucket that fails"
    )
    parser.add_argument("--schedule", action="store_true", help="print the setting and the first schedule, and run nothing")
    parser.add_argument("--check", type=Path, help="check this history, and run nothing")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a run without violations")
    given = parser.parse_args()
    if given.check:
        found = check(read(given.check), EXPECTED)
        print(*found, f"{len(found)} violations", sep="\n")
        return bool(found)
    setting = setting_of(given.seed, given.replicas, given.security, given.adapters, sglang=given.sglang, region=given.region)
    if given.schedule:
        print(setting, *draw(f"{given.seed}/0", given.storm, setting, boots=given.boots), sep="\n")
        return 0
    if reason := unavailable():
        parser.error(f"hosts cannot be emulated here: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="resharder-chaos-", dir=record_folder()))
    print(f"seed {given.seed}, {setting}, in {folder}", flush=True)
    servers = (given.server,) if given.server else SERVERS
    result = Storms(folder, given.seed, setting, servers, given.boots).run(60 * given.minutes, given.storm)
    report(result, folder, given.seed)
    if not result.violations and not given.keep:
        shutil.rmtree(folder)
    sys.stdout.flush()
    os._exit(bool(result.violations))  # no thread of the run is waited for


def report(result: Result, folder: Path, seed: int) -> None:
    """Print counts, violations, and for a failing run its schedules."""
    events = read(folder / "history.jsonl")
    faults = Counter(event["name"] for event in events if event["kind"] == "fault")
    operations = Counter(event["name"] for event in events if event["kind"] == "begin")
    outcomes = Counter(event["outcome"] for event in events if event["kind"] == "end")
    published = [end["result"]["ranks"] for _, end in published_in(events)]
    at_home = sum(any(rank["transport"] == "node" for rank in ranks) for ranks in published)
    moved = [event for event in events if event["kind"] == "moved"]
    copied = {node: max(e["peers"] for e in moved if e["node"] == node) for node in {event["node"] for event in moved}}
    turned = Counter(event["status"] for event in events if event["kind"] == "turned")
    refused = Counter(event["outcome"] for event in events if event["kind"] == "intrusion")
    short = {event["number"] for event in events if short_of_holders(event)}
    print(f"{len(result.schedules)} storms, {events[-1]['t']:.0f} s")
    print(f"{result.compared} answers and {result.tokens} tokens compared; not answered: {counted(turned)}")
    print(f"{len(published)} versions published, {at_home} of them on a node; {sum(map(is_lost, events))} lost")
    alone = {number for event in events if event["kind"] == "alone" for number in event["versions"]}
    print(f"{len(alone)} versions on killed nodes alone")
    print(f"{len(short)} versions aborted for lack of holders; at least {sum(copied.values())} bytes between nodes")
    print(f"faults: {counted(faults)}; intrusions: {counted(refused)}")
    print(f"operations: {counted(operations)}; outcomes: {counted(outcomes)}")
    there = [event for event in events if event["kind"] == "region"]
    if there:
        seen = {event["number"] for event in there if event["what"] == "ready"}
        moves = sum(event["what"] == "served" for event in there)
        print(f"{len(seen)} versions followed and compared in the region, whose server moved {moves} times")
    for phase in ("processes", "settled", "arrived"):
        took = [event["seconds"] for event in events if event["kind"] == "peace" and event["phase"] == phase]
        print(f"peace, {phase}: at most {max(took, default=0.0):.1f} s")
    by_rule = Counter(violation.rule for violation in result.violations)
    print(f"{len(result.violations)} violations{': ' if by_rule else ''}{counted(by_rule) if by_rule else ''}")
    if result.violations:
        for number, schedule in enumerate(result.schedules):
            print(f"schedule {seed}/{number}:", *schedule, sep="\n")
        for violation in result.violations[:40]:
            print(str(violation)[:1500])
        print(f"seed {seed}; history and logs are in {folder}")


def counted(counts: Counter) -> str:  # type: ignore[type-arg]
    """Return counts as text, the largest first."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


if __name__ == "__main__":
    sys.exit(main())
