"""Kinds of models whose versions go over every path: dense, experts, and FP8 blocks that the ranks cast."""

from dataclasses import dataclass
from typing import Any

from tests.support.fp8_checkpoint import fp8_config
from tests.support.tiny_hf import tiny_config


@dataclass(frozen=True)
class Kind:
    """A model that two ranks train and two workers serve.

    Attributes:
        config: content of the served model's config.json.
        parallelism: the ranks', and the dtype of their parameters.
        dtype: the server's.
        plugins: further plugins of the server, for its CPU kernels.
        arguments: further ones of the server.
    """

    config: dict[str, Any]
    parallelism: dict[str, Any]
    dtype: str = "float32"
    plugins: str = ""
    arguments: tuple[str, ...] = ()

    def trainer(self, **options: Any) -> dict[str, Any]:
        """Return the trainer's settings, with these options of `connect`."""
        plain = {key: value for key, value in self.config.items() if key != "quantization_config"}
        quantised = {"quantization_config": self.config["quantization_config"]} if plain != self.config else {}
        return {"config": plain, "connect": options | quantised, **self.parallelism}


KINDS = {
    "dense": Kind(tiny_config("qwen3"), {"tp": 2}),
    "experts": Kind(tiny_config("qwen3_moe"), {"ep": 2}),
    "fp8 blocks": Kind(
        fp8_config("qwen3_moe"),
        {"tp": 2, "ep": 2, "dtype": "bfloat16"},
        "bfloat16",
        ",reference_fp8",
        ("--enable-expert-parallel",),
    ),
}
"""FP8 blocks need vLLM 0.32 on a CPU."""
