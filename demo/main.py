"""From Megatron to a running server, end to end, on one CPU box: `make demo`, or `make demo ENGINE=sglang`.

For a dense and a mixture-of-experts Qwen3: a daemon, four real Megatron ranks, and a server of vLLM or SGLang that boots from
the daemon with no checkpoint on any disk. Three versions are published while a client streams tokens. Each is verified: the
stored version has the published digests, the installed tensors have the stored digests, and the answers equal those of Megatron's
own forward.
At the end, a new server that loads the exported folder has to give exactly the same answers.
"""

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from demo.engines import ENGINES, Engine
from demo.proofs import Proven, digests_equal, export, installed, resharder
from demo.report import RunResult, VersionResult, as_json
from demo.stream import Stream
from demo.trainer_job import TrainerJob
from tests.support.daemon import Daemon
from tests.support.tiny_hf import tiny_config
from tests.support.vllm_server import Answer, VllmServer

PROMPT = [5, 17, 42, 7, 300, 11]
TOKENS = 16
RUNS: dict[str, dict[str, Any]] = {
    "Qwen3, tied embeddings, padded vocabulary; TP=2 PP=2": {
        "config": tiny_config("qwen3_tied"),
        "tp": 2,
        "pp": 2,
        "vocab_multiple": 64,
    },
    "Qwen3-MoE; TP=2 EP=2": {"config": tiny_config("qwen3_moe"), "tp": 2, "ep": 2, "vocab_multiple": 64},
}
console = Console(highlight=False, width=150)


def run(engine: Engine, title: str, settings: dict[str, Any]) -> RunResult:
    with TemporaryDirectory(prefix="resharder-demo-") as temporary, Daemon() as daemon:
        folder = Path(temporary)
        console.rule(title)
        with TrainerJob(daemon.endpoint, "policy", folder, settings) as trainer:
            boot = trainer.ask(do="publish", step=0)
            console.print(f"four Megatron ranks published version {boot['version']}; {engine.name} boots from the daemon …")
            resharder("fetch-config", folder / "config", endpoint=daemon.endpoint)
            with engine.following(folder / "config", daemon.endpoint) as server:
                console.print(f"serving version {server.generate(PROMPT, 1).version} after {server.ready_seconds:.0f} s")
                result, answer = publish_and_prove(engine, title, daemon, trainer, server, folder / "export")
        console.print(f"a fresh {engine.name} loads the exported folder …")
        last = result.versions[-1].version
        with engine.alone(folder / "export" / str(last)) as fresh:
            reference = engine.answer(fresh, PROMPT, TOKENS)
        result.fresh_server_equal = (reference.token_ids, reference.logprobs) == (answer.token_ids, answer.logprobs)
        equal = "equal" if result.fresh_server_equal else "DIFFER FROM"
        console.print(f"tokens and logprobs of the updated server {equal} those of the fresh one, to the last bit")
        return result


def publish_and_prove(
    engine: Engine, title: str, daemon: Daemon, trainer: TrainerJob, server: VllmServer, exports: Path
) -> tuple[RunResult, Answer]:
    """Return the results, and the server's answer on the last version when no client streams any more."""
    result = RunResult(title, "megatron-core, 4 ranks under torchrun", f"{engine.name} on CPU, one worker")
    with Stream(server, PROMPT) as stream:
        for step in (1, 2, 3):
            before = server.generate(PROMPT, TOKENS)
            published = trainer.ask(do="publish", step=step)
            number = published["version"]
            install = installed(daemon, number)
            after = server.generate(PROMPT, TOKENS)
            result.versions.append(judge(trainer, published, install, before, after))
            export(daemon, number, exports / str(number))
            result.versions[-1].digests_equal &= digests_equal(daemon, number, exports / str(number))
    result.streamed_tokens, result.stream_unbroken = stream.tokens, stream.unbroken
    console.print(table(result))
    console.print(f"meanwhile a client streamed {stream.tokens} tokens; {'unbroken' if stream.unbroken else stream.error}")
    return result, engine.answer(server, PROMPT, TOKENS)


def judge(trainer: TrainerJob, published: dict[str, Any], install: Proven, before: Answer, after: Answer) -> VersionResult:
    """Compare the server's answer with Megatron's forward over the same tokens."""
    scores = trainer.ask(do="score", tokens=[*PROMPT, *after.token_ids])
    first = len(PROMPT) - 1
    return VersionResult(
        version=published["version"],
        bytes=install.size_bytes,
        publish_s=published["ready_s"],
        stage_s=install.stage_seconds,
        apply_s=install.apply_seconds,
        pause_s=install.pause_seconds,
        digests_equal=install.verified_tensors > 0,
        tokens_equal=list(after.token_ids) == scores["greedy"][first:] and after.version == str(published["version"]),
        logprob_diff_megatron=max(abs(a - b) for a, b in zip(after.logprobs, scores["logprobs"][first:], strict=True)),
        answer_before=before.token_ids,
        answer_after=after.token_ids,
    )


def table(result: RunResult) -> Table:
    shown = Table("version", "bytes", "publish", "stage", "apply", "pause", "before", "after", "digests", "tokens", "Δ logprob")
    for v in result.versions:
        seconds = (f"{1000 * s:.0f} ms" for s in (v.publish_s, v.stage_s, v.apply_s, v.pause_s))
        answers = (" ".join(f"t{token}" for token in ids[:3]) + " …" for ids in (v.answer_before, v.answer_after))
        verdicts = ("equal" if equal else "[red]DIFFERENT" for equal in (v.digests_equal, v.tokens_equal))
        shown.add_row(str(v.version), f"{v.bytes:,}", *seconds, *answers, *verdicts, f"{v.logprob_diff_megatron:.0e}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="what serves (default: vllm)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    results = [run(ENGINES[arguments.engine], title, settings) for title, settings in RUNS.items()]
    if arguments.json:
        arguments.json.write_text(json.dumps(as_json(results), indent=2))
    ok = all(result.ok for result in results)
    console.print("[green]every proof holds" if ok else "[red]NOT PROVEN")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
