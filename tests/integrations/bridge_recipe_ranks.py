"""A rank of Megatron-Bridge's own LoRA recipe of Qwen3, on CPUs, that publishes its adapter; needs the package and Python 3.12.

`torchrun --nproc-per-node 1 -m tests.integrations.bridge_recipe_ranks MODEL_DIR DAEMON OUTPUT` imports the base to OUTPUT/base,
and with 2 ranks runs the recipe, and saves the adapter as Megatron-Bridge does, to OUTPUT/saved.

The recipe is for 0.6 billion parameters, a dataset from the hub, and GPUs: the model is that of MODEL_DIR, the data are the
mock dataset of Megatron-Bridge, precision and kernels are those of CPUs, and two ranks are tensor-parallel.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import fake_nvrx, megatron_shim  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.qwen.qwen3 import qwen3_600m_peft_config
from megatron.bridge.training import initialize, setup
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import MockGPTDatasetConfig
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.core.tensor_parallel import random
from resharder.client import PublishCallback
from torch.overrides import TorchFunctionMode

LENGTH = 16


class OnCpus(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        return function(*args, **given)


class Saves(Callback):  # type: ignore[misc]
    """Saves the adapter at the end as Megatron-Bridge does."""

    def __init__(self, bridge: Any, folder: Path, peft: Any) -> None:
        self._bridge, self._folder, self._peft = bridge, folder, peft

    def on_train_end(self, context: Any) -> None:
        self._bridge.save_hf_adapter(context.model, str(self._folder), self._peft)


def on_cpus() -> None:
    """Replace what the loop asks of CUDA on its way to the training step."""
    cuda: Any = torch.cuda
    cuda.set_device = lambda *args: None
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = lambda *args: torch.get_rng_state()
    cuda.set_rng_state = random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    initialize.compile_helpers = lambda: None  # the wheel has them
    setup.initialize_megatron = partial(setup.initialize_megatron, allow_no_cuda=True)


def main() -> None:
    folder, endpoint, output = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    on_cpus()
    if os.environ["WORLD_SIZE"] == "1":
        dist.init_process_group("gloo")
        import_base(folder, output / "base")
        return
    config, bridge = recipe(folder, output), AutoBridge.from_hf_pretrained(folder)
    publish = PublishCallback("bridge-lora", bridge.hf_pretrained.config, endpoint=endpoint, base="bridge")
    with OnCpus():
        finetune(config, forward_step, callbacks=[publish, Saves(bridge, output / "saved", config.peft)])
    if dist.is_initialized():
        dist.destroy_process_group()


def import_base(folder: str, output: Path) -> None:
    """Convert the model as `AutoBridge.import_ckpt` does."""
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider()
    set_kernels(provider)
    provider.finalize()
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    bridge.save_megatron_model(model, str(output), hf_tokenizer_path=folder)


def set_kernels(model: Any) -> None:
    """Choose the kernels that CPUs have, and FP32."""
    model.gradient_accumulation_fusion = model.bias_activation_fusion = model.bias_dropout_fusion = False
    model.masked_softmax_fusion = model.apply_rope_fusion = model.persist_layer_norm = model.cross_entropy_loss_fusion = False
    model.use_cpu_initialization = True
    model.bf16, model.params_dtype, model.pipeline_dtype = False, torch.float32, torch.float32


def recipe(folder: str, output: Path) -> Any:
    """Return the recipe, for this box."""
    plain = AutoBridge.from_hf_pretrained
    AutoBridge.from_hf_pretrained = lambda name, **options: plain(folder, **options)
    try:
        config = qwen3_600m_peft_config()
    finally:
        AutoBridge.from_hf_pretrained = plain
    config.model.tensor_model_parallel_size = 2
    config.model.seq_length = LENGTH
    set_kernels(config.model)
    config.mixed_precision = None
    config.optimizer.bf16 = config.optimizer.use_distributed_optimizer = config.ddp.use_distributed_optimizer = False
    config.optimizer.clip_grad = 0.0
    config.optimizer.lr, config.optimizer.min_lr = 1e-2, 1e-2
    config.scheduler.lr_warmup_iters = 0
    config.train.train_iters, config.train.global_batch_size = 2, 2
    config.validation.eval_iters = 0
    config.dataset = MockGPTDatasetConfig(
        seq_length=LENGTH,
        random_seed=1,
        reset_attention_mask=False,
        reset_position_ids=False,
        eod_mask_loss=False,
        num_dataset_builder_threads=1,
        dataloader_type="single",
        num_workers=0,
    )
    config.tokenizer.tokenizer_model = folder
    config.dist.distributed_backend = "gloo"
    config.checkpoint.pretrained_checkpoint = str(output / "base")
    config.checkpoint.save = config.checkpoint.load = None
    config.logger.tensorboard_dir = None
    return config


if __name__ == "__main__":
    main()
