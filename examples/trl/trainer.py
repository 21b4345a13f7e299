"""TRL's GRPOTrainer with a vLLM server that follows a Resharder daemon; TRL 1.16.

TRL's own transfer is one NCCL group of rank 0 and the server's workers. Here every rank publishes, and the server installs the
version; TRL asks the server for completions as before. Start a daemon, this trainer, and the server, in any order:

    resharderd &
    export RESHARDER_ENDPOINT=127.0.0.1:7677 RESHARDER_MODEL=policy VLLM_PLUGINS=resharder
    python examples/trl/trainer.py MODEL_DIR --server http://127.0.0.1:8000 --steps 2 &
    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_DIR --load-format resharder --logprobs-mode processed_logprobs --max-logprobs -1

With `--lora`, PEFT trains an adapter, which the server loads beside the base that is imported once:

    export RESHARDER_ADAPTERS=policy-lora
    resharder import MODEL_DIR --model policy --step 0

and the server also has `--enable-lora --max-loras 3`. TRL's own way merges the adapter into the model, and sends all of it.

Prints one JSON line for each version.
"""

import argparse
import itertools
import json
import os
import tempfile
from typing import Any
from uuid import uuid4

import trl.trainer.grpo_trainer as grpo
from accelerate.utils import is_peft_model
from datasets import Dataset
from peft import LoraConfig
from resharder.client import Publisher, connect
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient


class PublishingGeneration(grpo.VLLMGeneration):
    """TRL's generation by a server, with the weights by way of the daemon."""

    def _init_vllm(self) -> None:
        self.publisher: Publisher | None = None
        self.base, self.adapter = os.environ["RESHARDER_MODEL"], is_peft_model(self.model)
        self.published = os.environ["RESHARDER_ADAPTERS"] if self.adapter else self.base
        if self.accelerator.is_main_process:
            if not self.adapter:  # the server starts with this version; the model is whole until training begins
                with connect(model=self.base, job=f"start-{uuid4()}", rank=0, world_size=1) as first:
                    first.attach(self.model, self.model.config, self.processing_class)
                    first.publish(0).wait_ready()
            url = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self.vllm_client = VLLMClient(base_url=url, connection_timeout=self.server_timeout)
            if self.adapter:
                self.vllm_client.model = self.published

    def sync_weights(self) -> None:
        if self.publisher is None:  # accelerate has sharded the model by now
            self.steps = itertools.count()
            if self.adapter:
                self.publisher = connect(model=self.published, base=self.base)
                self.publisher.attach(self.model, self.model.config, adapter="default")
            else:
                self.publisher = connect(model=self.published)
                self.publisher.attach(self.model, self.model.config, self.processing_class)
        handle = self.publisher.publish(next(self.steps))
        handle.wait_serving()
        if self.accelerator.is_main_process:
            print(json.dumps({"step": handle.step, "version": handle.version}), flush=True)


grpo.VLLMGeneration = PublishingGeneration


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward of a completion: the share of even tokens."""
    return [sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)) for tokens in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="model folder with safetensors files and a tokenizer")
    parser.add_argument("--server", required=True, help="URL of the vLLM server")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps")
    parser.add_argument("--lora", action="store_true", help="train an adapter")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as output:
        settings = GRPOConfig(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-3,
            use_cpu=True,
            bf16=False,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=options.server,
            vllm_server_timeout=600.0,
            save_strategy="no",
            report_to="none",
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(options.folder, dtype="float32"),
            processing_class=AutoTokenizer.from_pretrained(options.folder),
            reward_funcs=even_tokens,
            train_dataset=Dataset.from_dict({"prompt": ["t5 t17 t42", "t11 t2 t9", "t77 t78 t79", "t300 t8 t4"]}),
            args=settings,
            peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear") if options.lora else None,
        )
        trainer.train()
        trainer.vllm_generation.publisher.close()


if __name__ == "__main__":
    main()
