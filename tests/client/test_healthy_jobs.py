"""Healthy jobs, which no refusal stops and of which no warning is recorded: attached fresh and resumed, at each of 20 steps.

Real ranks of the same are in dtensor_ranks.py and megatron_ranks.py, trainers of frameworks in tests/integrations.
"""

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import fakepg, tiny_hf
from tests.support.megatron_models import build_model, fill_from_hf, wrap_ddp, wrap_float16

# isort: split
import torch
from resharder.client.trainer.rank_layout import LiveTensors
from resharder.converters.allowances import collecting
from resharder.converters.models import local_layout
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.variants import sampled
from tests.support.weights import random_weights

STEPS = 20
TOKENS = torch.arange(1, 17)[None]
Config = dict[str, Any]


def step(model: Any) -> None:
    """One optimizer step, whose gradients are the weights themselves."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    torch.optim.SGD(model.parameters(), lr=0.125).step()


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    fakepg.enter(0, 1)
    yield
    fakepg.leave()


class Trained:
    """A transformers model that trains with dropout."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.model = self.built()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.01)

    def built(self) -> Any:
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.config)).train()

    @property
    def attached(self) -> Any:
        """What the job attaches."""
        return self.model

    def step(self) -> None:
        self.model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def resume(self) -> None:
        """Load its own state into a new model and optimizer, as a job that was started again."""
        model, optimizer = deepcopy(self.model.state_dict()), deepcopy(self.optimizer.state_dict())
        self.__init__(self.config)  # type: ignore[misc]
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class Frozen(Trained):
    """Without gradients for the embeddings and the first layer."""

    def built(self) -> Any:
        model = super().built()
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
        return model


class Recomputed(Trained):
    """With layers in torch's wrapper for recomputation."""

    def built(self) -> Any:
        model = super().built()
        for number, layer in enumerate(model.model.layers):
            model.model.layers[number] = checkpoint_wrapper(layer)
        return model


class Assigned(Trained):
    """It resumes by exchanging the parameters after it has attached the model."""

    def step(self) -> None:
        super().step()
        self.model.load_state_dict({name: tensor.clone() for name, tensor in self.model.state_dict().items()}, assign=True)
        self.model.tie_weights()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)


class Sharded(Trained):
    """With FSDP2, on the one rank that there is."""

    def built(self) -> Any:
        model, mesh = super().built(), init_device_mesh("cpu", (1,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def step(self) -> None:
        step(self.model)
        self.model(input_ids=TOKENS)  # leaves the root's parameters whole


class Adapter(torch.nn.Module):
    """A linear layer with a LoRA adapter, of PEFT's form: it merges in place, or, if `safe`, into other memory."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.down, self.up = torch.nn.Linear(layer.in_features, 4, bias=False), torch.nn.Linear(4, layer.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base_layer(inputs) + self.up(self.down(inputs))

    @torch.no_grad()
    def add(self, times: int, safe: bool) -> None:
        weight = self.base_layer.weight
        change = times * self.up.weight @ self.down.weight
        weight.data = weight.data + change if safe else weight.data.add_(change)


class Merged(Trained):
    """Adapters of attention, merged while a version is read."""

    safe = False

    def built(self) -> Any:
        model = super().built().requires_grad_(False)
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, Adapter(getattr(layer.self_attn, name)))
        return model

    @property
    def attached(self) -> Any:
        named = self.model.named_parameters()
        return {name.replace("base_layer.", ""): weight for name, weight in named if ".up." not in name and ".down." not in name}

    def add(self, times: int) -> None:
        for module in self.model.modules():
            if isinstance(module, Adapter):
                module.add(times, self.safe)

    def step(self) -> None:
        if self.optimizer.state:
            self.add(-1)
        super().step()
        self.add(1)


class MergedElsewhere(Merged):
    """The same with PEFT's `safe_merge`."""

    safe = True


class Megatron:
    """Chunks in Float16Module and DDP, with dropout, a padded vocabulary and frozen embeddings."""

    def __init__(self, config: Config) -> None:
        self.config = config
        chunks = build_model(config, dtype=torch.bfloat16, vocab_multiple=128, hidden_dropout=0.1, attention_dropout=0.1)
        fill_from_hf(chunks, config, random_weights(config, 1))
        chunks[0].embedding.requires_grad_(False)
        self.attached: Any = wrap_ddp(wrap_float16(chunks))
        for chunk in self.attached:
            chunk.train()

    def step(self) -> None:
        for chunk in self.attached:
            step(chunk)

    def resume(self) -> None:
        states = [deepcopy(chunk.state_dict()) for chunk in self.attached]
        self.__init__(self.config)  # type: ignore[misc]
        for chunk, state in zip(self.attached, states, strict=True):
            chunk.load_state_dict(state)


@dataclass(frozen=True)
class Case:
    job: type
    family: str


HF, TIED = "qwen3", "qwen3_tied"
CASES = [
    *(Case(job, family) for job in (Trained, Frozen, Sharded) for family in (HF, TIED, "gemma2", "qwen3_moe", "glm4_moe")),
    *(Case(job, family) for job in (Recomputed, Assigned, Merged, MergedElsewhere) for family in (HF, TIED)),
    *(Case(Megatron, family) for family in (HF, TIED, "gemma2", "qwen3_moe", "glm4_moe", "gpt_oss")),
]
KEPT = [Case(job, TIED) for job in (Trained, Sharded, MergedElsewhere, Megatron)]


def reader(attached: Any, config: Config) -> Callable[[], list[torch.Tensor]]:
    """Attach a model, and return what reads it for a version."""
    layout, tensors = local_layout(attached, config)
    live = LiveTensors(layout, tensors)

    def read() -> list[torch.Tensor]:
        live.check()
        return [tensor.clone() for _, tensor in live.items(range(len(layout.pieces)))]

    return read


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize("case", sampled(CASES, KEPT), ids=lambda case: f"{case.job.__name__}-{case.family}")
def test_a_healthy_job_is_published_at_each_step_and_after_it_was_resumed_without_a_warning(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = tiny_hf.tiny_config(case.family, num_hidden_layers=2)
    if case.job is not Megatron:
        config |= {"attention_dropout": 0.1, "num_nextn_predict_layers": 0}  # transformers builds no MTP layers
    with collecting() as allowed, caplog.at_level(logging.WARNING, "resharder"):
        job = case.job(config)
        before: list[torch.Tensor] = []
        for _ in range(2):
            read = reader(job.attached, config)
            for _ in range(STEPS // 2):
                job.step()
                published = read()
                assert same(published, reader(job.attached, config)()), "a job that attaches now would publish others"
                assert not before or not same(published, before), "the step changed nothing"
                before = published
            job.resume()
    assert allowed == []
    assert [record.message for record in caplog.records if record.name.startswith("resharder")] == []
