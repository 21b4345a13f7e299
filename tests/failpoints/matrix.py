"""The matrix of failpoints, one cycle for each failpoint and kind: the process that `python -m tests.failpoints` supervises."""

import argparse
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import inf

from tests.failpoints.adapter_cycle import AdapterCycle
from tests.failpoints.cases import ADAPTER_POINTS, KINDS, Case, all_cases
from tests.failpoints.checks import end
from tests.failpoints.cycle import Cycle, Report
from tests.failpoints.roles import warm
from tests.failpoints.together_cycle import TogetherCycle


def run(case: Case | None) -> Report:
    """Run one case; a case that did not reach its point has a problem."""
    cycle = cycle_of(case)(case)
    report = cycle.run()
    end(cycle.folder)
    if case is not None and not report.reached and not report.problem:
        report.problem = "the cycle did not reach the failpoint"
    if report.problem:
        report.problem += f" (kept: {cycle.folder})"
    return report


def cycle_of(case: Case | None) -> type[Cycle]:
    if case is not None and case.together:
        return TogetherCycle
    return AdapterCycle if case is not None and case.point in ADAPTER_POINTS else Cycle


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.failpoints", description=__doc__)
    parser.add_argument("--only", help="part of a failpoint's name")
    parser.add_argument("--kind", choices=list(KINDS))
    parser.add_argument("--together", action="store_true", help="only cycles of versions that are READY together")
    parser.add_argument("--jobs", type=int, default=2, help="cycles at a time")
    parser.add_argument("--sample", type=int, default=0, help="a number of cases, chosen by --seed; 0: all")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--seconds", type=float, default=inf, help="begin no cycle after this time")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first cases, which were run before")
    given = parser.parse_args()
    cases = [case for case in all_cases() if (not given.only or given.only in case.point) and given.kind in (None, case.kind)]
    cases = [case for case in cases if case.together or not given.together]
    if given.sample:
        cases = random.Random(given.seed).sample(cases, min(given.sample, len(cases)))
    cases = cases[given.skip :]
    began, failed, counts = time.monotonic(), list[Report](), Counter[str]()
    warm()

    def run_in_time(case: Case) -> Report | None:
        return run(case) if time.monotonic() - began < given.seconds else None

    with ThreadPoolExecutor(given.jobs) as pool:
        for future in as_completed([pool.submit(run_in_time, case) for case in cases]):
            report = future.result()
            if report is None:
                continue
            case = report.case
            assert case is not None
            counts[case.place] += 1
            failed += [report] if report.problem else []
            state = f"FAILED: {report.problem}" if report.problem else ", ".join([*report.deaths, *report.refusals])[:100]
            which = f"{case.point}@{case.together}" if case.together else case.point
            print(f"{which:24} {case.kind:7} {report.seconds:6.1f} s  {state}", flush=True)
    by_place = ", ".join(f"{place} {count}" for place, count in counts.items())
    for report in failed:
        print(f"{report.case}: {report.problem}")
    ran, seconds = counts.total(), time.monotonic() - began
    rest = f"; run the rest with --skip {given.skip + ran}" if ran < len(cases) else ""
    print(f"{ran} of {len(cases)} cases ({by_place}) in {seconds:.0f} s, {len(failed)} failed{rest}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
