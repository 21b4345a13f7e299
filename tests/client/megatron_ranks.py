"""Four real Megatron ranks, in one world whatever is asked of them: starting one takes longer than most of what it does.

`main(ENDPOINT, FOLDER)` under `tests.support.ranks`, with FOLDER/cases.json and the checkpoint of each case in
FOLDER/MODEL; writes FOLDER/found.json.
"""

import json
from pathlib import Path
from typing import Any

from tests.support.fp8_optimizer import Training
from tests.support.megatron_models import build_model, fill_from_hf, logits, wrap_ddp, wrap_float16

# isort: split
import resharder.client.trainer.connect as resharder
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from resharder.client.trainer.fill import fill
from resharder.converters.models import local_layout
from transformers import AutoModelForCausalLM

from tests.support.tiny_hf import load_checkpoint

Config = dict[str, Any]
STEPS = 20


def publish(endpoint: str, source: Path, config: Config, layout: dict[str, Any], wrapped: bool) -> None:
    """What each rank of a trainer does; its weights change as soon as they are published."""
    chunks = build_model(config, **layout, dtype=torch.bfloat16 if wrapped else torch.float32)
    fill_from_hf(chunks, config, load_checkpoint(source))
    if wrapped:
        chunks = wrap_ddp(wrap_float16(chunks))
    with resharder.connect(endpoint, model=source.name) as publisher:
        publisher.attach(chunks, config, tokenizer=source, check_replicas=True)
        handle = publisher.publish(step=1)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(9)
        handle.wait_ready(120)


def train(endpoint: str, source: Path, config: Config, layout: dict[str, Any]) -> None:
    """Publish before and after 20 steps with dropout and frozen embeddings, and from a new job that resumes."""

    def built() -> list[Any]:
        chunks = build_model(config, **layout, dtype=torch.bfloat16, hidden_dropout=0.1, attention_dropout=0.1)
        fill_from_hf(chunks, config, load_checkpoint(source))
        chunks[0].embedding.requires_grad_(False)
        return [chunk.train() for chunk in wrap_ddp(wrap_float16(chunks))]

    chunks = built()
    torch.manual_seed(parallel_state.get_data_parallel_rank())  # tensor-parallel ranks drop out the same
    with resharder.connect(endpoint, model=source.name) as publisher:
        publisher.attach(chunks, config, tokenizer=source, check_replicas=True)
        publisher.publish(step=0).wait_ready(120)
        take_steps(chunks, config)
        publisher.publish(step=STEPS).wait_ready(120)
    resumed = built()
    resumed[0].load_state_dict(chunks[0].state_dict())
    with resharder.connect(endpoint, model=source.name) as publisher:
        publisher.attach(resumed, config, tokenizer=source, check_replicas=True)
        publisher.publish(step=STEPS).wait_ready(120)


def take_steps(chunks: list[Any], config: Config) -> None:
    trained = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    tokens = torch.randint(0, config["vocab_size"], (2, 16))
    positions, future = torch.arange(16).expand(2, 16), torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    for _ in range(STEPS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        chunks[0](tokens, positions, future, labels=tokens).mean().backward()
        finalize_model_grads(chunks)
        for parameter in trained:
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        optimizer.step()


def go_on(endpoint: str, source: Path, config: Config, published: dict[str, Any], filled: dict[str, Any]) -> dict[str, float]:
    """Fill from a checkpoint, publish; build anew under another layout, fill from that version, compare the logits with
    transformers'."""
    chunks = build_model(config, **published)
    fill(chunks, config, source)
    with resharder.connect(endpoint, model=source.name) as publisher:
        publisher.attach(chunks, config)
        publisher.publish(step=1).wait_ready(120)
    chunks = build_model(config, **filled)
    version = f"resharder://{endpoint}/models/{source.name}/versions/latest"
    proven = fill(chunks, config, version, shared=dist.get_rank() % 2 == 0).proven
    boxes = len({(piece.tensor, piece.box) for piece in local_layout(chunks, config)[0].pieces})
    tokens = torch.randint(0, config["vocab_size"], (2, 31), generator=torch.Generator().manual_seed(7))
    found, worst = logits(chunks, config, tokens), torch.zeros(())
    if found is not None:
        reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            worst = (found - reference(tokens).logits).abs().max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {"difference": float(worst), "proven": proven, "boxes": boxes}


def cast(endpoint: str, source: Path, config: Config, layout: dict[str, Any], options: dict[str, Any]) -> None:
    """Publish one model as it is and cast to FP8. Its weights change as soon as the cast version is published."""
    chunks = build_model(config, **layout, dtype=torch.bfloat16)
    fill_from_hf(chunks, config, load_checkpoint(source))
    for name, given in ((source.name, {}), (f"{source.name}-fp8", options)):
        with resharder.connect(endpoint, model=name, **given) as publisher:
            publisher.attach(chunks, config, tokenizer=source)
            for step in (1, 2):
                handle = publisher.publish(step)
                for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                    parameter.data.mul_(1 + step)
                handle.wait_ready(120)
            fill_from_hf(chunks, config, load_checkpoint(source))


def divided(endpoint: str, source: Path, config: Config, layout: dict[str, Any], options: dict[str, Any]) -> None:
    """Publish FP8 weights, and their master weights as a plain model beside, before and after a step of the optimizer."""
    plain = build_model(config, **layout, spec="te")
    chunks = build_model(config, **layout, dtype=torch.bfloat16, spec="te")
    fill_from_hf(chunks, config, load_checkpoint(source))
    training = Training(chunks)
    with (
        resharder.connect(endpoint, model=source.name, **options) as publisher,
        resharder.connect(endpoint, model=f"{source.name}-masters") as masters,
    ):
        publisher.attach(training.chunks, config, tokenizer=source)
        masters.attach(plain, config)
        for step in (1, 2):
            handles = [publisher.publish(step)]
            whole = training.masters()
            for name, parameter in plain[0].named_parameters():
                parameter.data.copy_(whole[f"0.{name}"])
            handles.append(masters.publish(step))
            training.step()
            for handle in handles:
                handle.wait_ready(120)


ACTS = {"publish": publish, "train": train, "go_on": go_on, "cast": cast, "divided": divided}


def main(endpoint: str, path: str) -> None:
    folder = Path(path)
    dist.init_process_group("gloo")
    found = {}
    for act, cases in json.loads((folder / "cases.json").read_text()).items():
        for model, case in cases.items():
            config = json.loads((folder / model / "config.json").read_text())
            found[model] = ACTS[act](endpoint, folder / model, config, **case)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
