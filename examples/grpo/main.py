"""Start a daemon, two Megatron ranks and a vLLM server, run GRPO, and draw the chart.

python -m examples.grpo.main --steps 30 --image build/grpo.svg

With `--lora`, one rank trains an adapter by PEFT, over a base that does not change.

Exits with 1 if the reward of the last five steps is not above that of the first five by 0.2 or more.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from resharder.client import Operator, PauseMode, Version
from rich.console import Console
from rich.progress import Progress

from examples.grpo.chart import svg
from examples.grpo.history import FIRST, LAST, History, Pause, Step, read_steps
from examples.grpo.processes import daemon, free_port, process, program, vllm_server

BASE, ADAPTER = "policy", "policy-lora"
SERVER_OPTIONS = ["--load-format", "resharder", "--enable-scale-out", "--max-num-seqs", "64", "--served-model-name", "m"]
"""`--enable-scale-out` adds the route that names the version of each token."""
LORA_OPTIONS = ["--enable-lora", "--max-loras", "3", "--max-lora-rank", "16"]
START_SECONDS, STEP_SECONDS = 500.0, 300.0
GAIN = 0.2
console = Console(highlight=False)


class TrainerFailed(RuntimeError):
    """The ranks have ended early, or make no progress."""


def run(steps: int, seed: int, lora: bool = False) -> History:
    """Run the job, and return its history. Raises TrainerFailed with the end of the ranks' output."""
    trained, count, module = (ADAPTER, "1", "lora") if lora else (BASE, "2", "trainer")
    options = SERVER_OPTIONS + (LORA_OPTIONS if lora else [])
    plugin = {"RESHARDER_MODEL": BASE} | ({"RESHARDER_ADAPTERS": ADAPTER} if lora else {})
    with TemporaryDirectory(prefix="resharder-grpo-") as temporary, daemon(Path(temporary)) as endpoint:
        folder, port = Path(temporary), free_port()
        arguments = [endpoint, f"http://127.0.0.1:{port}", str(folder), str(steps), str(seed)]
        torchrun = [*program("torch.distributed.run"), "--standalone", "--nproc-per-node", count, "-m", f"examples.grpo.{module}"]
        with (
            process([*torchrun, *arguments], folder / "trainer.log", {"OMP_NUM_THREADS": "1"}) as ranks,
            Operator(endpoint) as operator,
        ):
            console.print(
                "a base is imported, and an adapter published …" if lora else "two Megatron ranks publish their weights …"
            )
            wait_ready(operator, trained, ranks, folder)
            if not lora:
                operator.set_fleet(BASE, model=BASE, pause_mode=PauseMode.KEEP)
            operator.fetch_config(folder / "config", model=BASE)
            console.print("a vLLM server loads them from the daemon …")
            with vllm_server(folder / "config", options, endpoint, port, plugin):
                return follow(operator, trained, ranks, folder, steps)


def wait_ready(operator: Operator, model: str, ranks: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not any(version.model == model and version.state is Version.State.READY for version in operator.versions()):
        check(ranks, folder, deadline)
        time.sleep(0.2)


def follow(operator: Operator, model: str, ranks: subprocess.Popen[bytes], folder: Path, steps: int) -> History:
    """Watch the job until the last version of the model is served."""
    seen, pauses = list[Step](), dict[int, Pause]()
    deadline = time.monotonic() + STEP_SECONDS
    with Progress(console=console) as progress:
        bar = progress.add_task("GRPO", total=steps)
        while len(seen) < steps or seen[-1].version not in pauses:
            for step in read_steps(folder / "steps.jsonl")[len(seen) :]:
                seen.append(step)
                deadline = time.monotonic() + STEP_SECONDS
                progress.update(bar, completed=step.step, description=f"GRPO: reward {step.reward:.2f}")
            for server in operator.servers():
                if server.model == model and server.install is not None and server.install.pause_seconds:
                    pauses[server.install.version] = Pause(server.install.version, server.install.pause_seconds)
            if len(seen) < steps:
                check(ranks, folder, deadline)
            elif time.monotonic() > deadline:
                raise TrainerFailed(f"expected version {seen[-1].version} to be served within {STEP_SECONDS:.0f} s")
            time.sleep(0.02)
    return History(seen, sorted(pauses.values(), key=lambda pause: pause.version))


def check(ranks: subprocess.Popen[bytes], folder: Path, deadline: float) -> None:
    """Raise TrainerFailed if the ranks have failed, or if the time is over."""
    failed = ranks.poll()
    if failed or time.monotonic() > deadline:
        reason = f"the ranks ended with {failed}" if failed else "the ranks make no progress"
        raise TrainerFailed(f"{reason}\n{(folder / 'trainer.log').read_text(errors='replace')[-6000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps, at least 10")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of the prompts")
    parser.add_argument("--lora", action="store_true", help="train an adapter by PEFT")
    parser.add_argument("--image", type=Path, default=Path("build/grpo.svg"), help="chart to write")
    parser.add_argument("--json", type=Path, help="also write the history to this file")
    options = parser.parse_args()
    if options.steps < 10:
        parser.error(f"expected at least 10 steps, got {options.steps}")
    history = run(options.steps, options.seed, options.lora)
    if options.json:
        history.write(options.json)
    options.image.parent.mkdir(parents=True, exist_ok=True)
    options.image.write_text(svg(history))
    first, last = history.mean_reward(FIRST), history.mean_reward(LAST)
    mixed, seconds = sum(step.mixed for step in history.steps), sum(step.seconds for step in history.steps)
    console.print(f"{options.steps} steps in {seconds:.0f} s: reward {first:.2f} → {last:.2f}; {len(history.pauses)} installs;")
    console.print(f"{mixed} responses across an install; the chart is {options.image}")
    if last - first < GAIN:
        console.print(f"[red]expected the reward to rise by {GAIN} or more")
        sys.exit(1)


if __name__ == "__main__":
    main()
