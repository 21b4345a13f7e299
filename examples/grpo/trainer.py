"""One rank of the trainer: two Megatron ranks with tensor parallelism, under torchrun.

torchrun --nproc-per-node 2 -m examples.grpo.trainer DAEMON SERVER FOLDER STEPS SEED

Rank 0 asks the server for the samples of the next step while both ranks train on those of this one, so that the samples lag by
one step, or two if the server is still installing the newest version.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resharder.client import Publisher, connect, fill
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from examples.grpo.history import Step, append
from examples.grpo.objective import group_advantages, lags, policy_loss
from examples.grpo.reward import PROMPT_LENGTH, prompts, reward
from examples.grpo.sampler import Sampler
from examples.grpo.samples import Sample
from examples.megatron.model import build, token_losses

PROMPTS, GROUP, LENGTH = 32, 8, 12
MAX_LAG = 2  # optimizer steps; older tokens are dropped
LEARNING_RATE = 2e-3
MODEL, SERVED_NAME = "policy", "m"
CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,  # of 32 elements, the least that vLLM's attention supports on a CPU
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    architectures=["Qwen2ForCausalLM"],
    dtype="float32",
)


Logprobs = Callable[[Any, Sequence[Sample]], torch.Tensor]
"""Log-probabilities of the responses' tokens by the model's weights, [responses, tokens]."""


def main() -> None:
    endpoint, url, folder, steps, seed = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        save_initial(folder / "initial", seed)
    dist.barrier()
    model = build(CONFIG)
    fill(model, CONFIG, folder / "initial")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    with connect(endpoint, model=MODEL, max_ahead=2) as publisher:
        publisher.attach(model, CONFIG, tokenizer=folder / "initial", check_replicas=True)
        run(publisher, model, optimizer, response_logprobs, Sampler(url, SERVED_NAME, GROUP, LENGTH), folder, steps, seed)
    dist.destroy_process_group()


def run(
    publisher: Publisher,
    model: Any,
    optimizer: torch.optim.Optimizer,
    logprobs: Logprobs,
    server: Sampler,
    folder: Path,
    steps: int,
    seed: int,
) -> None:
    """Publish, sample and train, step by step, on every rank. Rank 0 asks the server, and writes `steps.jsonl` to the folder."""
    sampler = server if dist.get_rank() == 0 else None
    published = publisher.publish(0)
    steps_of = {published.version: 0}
    if sampler:
        sampler.wait_ready()
    coming = sampler.start(prompts(PROMPTS, seed=1000 * seed + 1)) if sampler else None
    for step in range(1, steps + 1):
        start = time.perf_counter()
        samples = share(coming)
        coming = sampler.start(prompts(PROMPTS, seed=1000 * seed + step + 1)) if sampler and step < steps else None
        record = train(model, optimizer, logprobs, samples, steps_of, step)
        version = publisher.publish(step).version
        steps_of[version] = step
        if sampler:
            append(folder / "steps.jsonl", Step(step=step, version=version, **record, seconds=time.perf_counter() - start))
    server.close()


def save_initial(folder: Path, seed: int, config: Qwen2Config = CONFIG) -> None:
    """Write the initial weights of transformers, and a tokenizer whose word for token `i` is `ti`."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(CONFIG.vocab_size)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t2", unk_token="t3").save_pretrained(folder)


def share(coming: Future[list[Sample]] | None) -> list[Sample]:
    """Wait on rank 0 for its samples, and return them on every rank. Raises RuntimeError on every rank if there are none."""
    box: list[Any] = [None]
    if coming is not None:
        error = coming.exception()
        box = [repr(error) if error else coming.result()]
    dist.broadcast_object_list(box)
    if isinstance(box[0], str):
        raise RuntimeError(f"expected samples of the server, got {box[0]}")
    samples: list[Sample] = box[0]
    return samples


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    logprobs: Logprobs,
    samples: Sequence[Sample],
    steps_of: dict[int, int],
    step: int,
) -> dict[str, Any]:
    """Make one optimizer step, and return what it used for the record."""
    rewards = torch.tensor([reward(sample.prompt, sample.response) for sample in samples])
    lag = lags(samples, steps_of, current=step - 1)
    keep = lag <= MAX_LAG
    loss = policy_loss(
        logprobs(model, samples),
        torch.tensor([sample.logprobs for sample in samples]),
        group_advantages(rewards, GROUP),
        keep,
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {
        "reward": rewards.mean().item(),
        "lag": lag.double().mean().item(),
        "max_lag": int(lag.max()),
        "mixed": sum(sample.mixed for sample in samples),
        "dropped": 1 - keep.double().mean().item(),
    }


def response_logprobs(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """Compute `Logprobs` of a Megatron model."""
    tokens = torch.tensor([sample.prompt + sample.response for sample in samples])
    return -token_losses(model, tokens)[:, PROMPT_LENGTH - 1 :]


if __name__ == "__main__":
    main()
