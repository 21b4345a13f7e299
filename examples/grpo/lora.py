"""The trainer of an adapter: PEFT on one rank, over a base that is imported once and does not change.

torchrun --nproc-per-node 1 -m examples.grpo.lora DAEMON SERVER FOLDER STEPS SEED

The step is that of `trainer.py`. The server's requests name the adapter, and end on the version that they began with.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from resharder.client import connect
from transformers import AutoModelForCausalLM, Qwen2Config

from examples.grpo.processes import program
from examples.grpo.reward import PROMPT_LENGTH
from examples.grpo.sampler import Sampler
from examples.grpo.samples import Sample
from examples.grpo.trainer import CONFIG, GROUP, LENGTH, run, save_initial

BASE, MODEL = "policy", "policy-lora"
LEARNING_RATE = 1e-2
BASE_CONFIG = Qwen2Config(**CONFIG.to_dict() | {"initializer_range": 0.1})
"""With larger weights than those of a new model: an adapter turns hidden states, and the output layer stays as it is."""
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")


def main() -> None:
    endpoint, url, folder, steps, seed = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    save_initial(folder / "initial", seed, BASE_CONFIG)
    imported = ["import", str(folder / "initial"), "--model", BASE, "--step", "0", "--endpoint", endpoint]
    subprocess.run([*program("resharder.client.cli"), *imported], check=True)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "initial"), LORA)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.0)
    with connect(endpoint, model=MODEL, base=BASE, max_ahead=2) as publisher:
        publisher.attach(model, BASE_CONFIG)
        run(publisher, model, optimizer, response_logprobs, Sampler(url, MODEL, GROUP, LENGTH), folder, steps, seed)
    dist.destroy_process_group()


def response_logprobs(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """Compute `Logprobs` of a transformers model."""
    tokens = torch.tensor([sample.prompt + sample.response for sample in samples])
    logprobs: torch.Tensor = model(tokens[:, :-1]).logits.log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None])[:, PROMPT_LENGTH - 1 :, 0]


if __name__ == "__main__":
    main()
