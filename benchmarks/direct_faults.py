"""Faults and sleep on the direct path, with real parts: one Megatron rank on a GPU, one vLLM server on another.

`python -m benchmarks.direct_faults [--layers N] [--only sleep|faults]`; `--each 2`: two ranks and a server of two workers, on
four GPUs, where faults hit one of the ranks; `--cpu-tiny` runs it on a CPU, as a trial. Invariants are checked, and observations
are printed in a table at the end. No duration is compared with a bound.
"""

import argparse
import subprocess
import time
from collections.abc import Callable

import psutil
from resharder.client.operator import Operator
from resharder.v1 import resources_pb2
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, PROMPT, Job, System, frozen
from tests.support.observing import servers, wait_serving, wait_until

SECONDS = {False: 8.0, True: 20.0}  # for a group's set-up and for a transfer, on GPUs and on a CPU
AWAKE, ASLEEP_1, ASLEEP_2 = resources_pb2.AWAKE, resources_pb2.ASLEEP_1, resources_pb2.ASLEEP_2
MIB = 1 << 20


class Trial:
    def __init__(self, system: System, cpu: bool) -> None:
        self.system, self.cpu = system, cpu
        self.table = Table("what", "seen")

    def note(self, what: str, seen: str) -> None:
        self.system.say(f"{what}: {seen}")
        self.table.add_row(what, Text(seen))

    def used(self) -> int:
        """Return the MiB in use on the server's GPU, by all processes."""
        if self.cpu:
            return 0
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", self.system.gpus[0][0]]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def serves(self, version: int) -> None:
        wait_serving(self.system.daemon, version, 300)
        answered = self.system.servers[0].generate(PROMPT, 8).version
        if answered != str(version):
            raise AssertionError(f"expected an answer of version {version}, got {answered}")

    def direct_again(self, after: str) -> None:
        version = self.system.publish()
        self.serves(version)
        if not self.system.sent(version):
            raise AssertionError(f"version {version} did not come directly: {self.system.events('direct_failed')[-3:]}")
        seconds = next(line["seconds"] for line in self.system.events("direct_transfer") if line["version"] == version)
        self.note(f"the next version after {after}", f"direct, {seconds * 1000:.0f} ms")

    def stored(self, version: int, fault: str, began: float) -> None:
        """Check that the version was installed from the store, complete, after the direct path failed."""
        self.serves(version)
        seconds = time.monotonic() - began
        if self.system.sent(version):
            raise AssertionError(f"{fault}: version {version} came directly all the same")
        reasons = [line["reason"][:150] for line in self.system.events("direct_failed")[-1:]]
        pause = servers(self.system.daemon)[0].install.pause_seconds
        self.note(fault, f"version {version} from the store after {seconds:.1f} s, pause {pause:.1f} s; {reasons}")

    def power(self, power: "resources_pb2.Power") -> float:
        began = time.monotonic()
        with Operator(self.system.daemon.endpoint) as operator:
            if power == AWAKE:
                operator.wake("policy")
            else:
                operator.sleep("policy", level=1 if power == ASLEEP_1 else 2)
        wait_until(lambda: servers(self.system.daemon)[0].power == power, resources_pb2.Power.Name(power), 120)
        return time.monotonic() - began

    def sleeps(self, power: "resources_pb2.Power") -> None:
        name, awake = resources_pb2.Power.Name(power), self.used()
        slept, asleep = self.power(power), self.used()
        version = self.system.publish(seed=100 + power)
        began = time.monotonic()
        self.power(AWAKE)
        self.serves(version)
        woke, held = time.monotonic() - began, self.system.fingerprints()
        self.note(
            f"{name}, a version published meanwhile",
            f"asleep in {slept:.2f} s, {awake - asleep} MiB of {awake} freed; woke to version {version} in {woke:.2f} s, "
            f"{'directly' if self.system.sent(version) else 'from the store'}; {self.used()} MiB then",
        )
        self.direct_again(name)
        version = self.system.publish(seed=100 + power)
        self.serves(version)
        if not self.system.sent(version) or self.system.fingerprints() != held:
            raise AssertionError(f"{name}: the same weights, directly, are others than those it woke to")
        self.note(f"the weights it woke to, once more over the direct path, after {name}", "every tensor the same")

    def rank_hangs(self) -> None:
        pid = self.system.trainer.ask(do="fault", what="stop")["pid"]
        with frozen(pid):
            began, wanted = time.monotonic(), self.system.newest + 1
            asked = self.system.begin_publish()
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the rank has stopped", 120)
            self.stored(wanted, "a rank stopped in the middle of a transfer", began)
        answer = self.system.trainer.requests.reply(asked, 120)
        self.note("the rank, let go on", f"returned from publish of version {answer['version']}")
        self.direct_again("that")

    def rank_dies(self) -> None:
        self.system.trainer.ask(do="fault", what="die")
        began, wanted = time.monotonic(), self.system.newest + 1
        self.system.begin_publish()
        self.stored(wanted, "a rank killed in the middle of a transfer", began)
        self.system.trainer.kill()
        self.system.start_trainer()
        self.direct_again("that, from a new trainer")

    def worker_dies(self) -> None:
        self.system.trainer.ask(do="fault", what=str(SECONDS[self.cpu]))
        began, wanted = time.monotonic(), self.system.newest + 1
        asked = self.system.begin_publish()
        wait_until(lambda: any(e["version"] == wanted for e in self.system.events("direct_turn")), "the transfer has begun")
        self.system.kill_engine(0)
        answer = self.system.trainer.requests.reply(asked, 300)
        self.note("a worker killed in the middle of a transfer", f"publish returned after {time.monotonic() - began:.1f} s")
        server = self.system.servers[0]
        server.kill()
        server.start()
        server.wait_ready()
        self.stored(int(answer["version"]), "the same server, started again", began)
        self.direct_again("that")


def run(job: Job, each: int, cpu: bool, only: str | None) -> None:
    more = () if cpu else ("--enable-sleep-mode",)
    with System(job, each, each, cpu=cpu, more=more, direct_seconds=SECONDS[cpu]) as system:
        trial = Trial(system, cpu)
        parts: dict[str, list[Callable[[], None]]] = {
            "sleep": [lambda: trial.sleeps(ASLEEP_1), lambda: trial.sleeps(ASLEEP_2)],
            "faults": [trial.rank_hangs, trial.rank_dies, trial.worker_dies],
        }
        try:
            trial.direct_again("the boot")
            for name, acts in parts.items():
                for act in acts if only in (None, name) else ():
                    act()
        finally:
            Console(width=180).print(trial.table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="of Qwen3-8B's 36")
    parser.add_argument("--only", choices=["sleep", "faults"])
    parser.add_argument("--each", type=int, default=1, help="ranks of the trainer, and workers of the server")
    parser.add_argument("--cpu-tiny", action="store_true")
    arguments = parser.parse_args()
    job = CPU_JOBS[0]
    if not arguments.cpu_tiny:
        few = GPU_JOBS[0].config | {"num_hidden_layers": arguments.layers}
        job = Job(f"Qwen3-8B, {arguments.layers} layers", few, "tp")
    run(job, arguments.each, arguments.cpu_tiny, arguments.only)


if __name__ == "__main__":
    main()
