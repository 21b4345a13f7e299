"""Tiny vision-language models with a processor, what is asked of their servers, and what transformers would answer.

torchvision, which transformers' processors need, is the stand-in in `images` where there is none.
"""

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from tests.support.vllm_server import MODEL_NAME, ServerFailed, VllmServer

IMAGES, PLUGINS = (Path(__file__).with_name(name) for name in ("images", "raw_mode"))
ROOT = Path(__file__).parents[2]
TEXT = "t5 t17 t42 t7"


class Said(NamedTuple):
    """An answer: one logprob for each token id. `version`: the header, None without the plugin."""

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str | None

    @property
    def content(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return self.token_ids, self.logprobs


def vision_server(folder: Path, endpoint: str | None, *arguments: str, plugins: str = "", **options: Any) -> VllmServer:
    """A server of a model with a processor, which follows the daemon at `endpoint`, or has nothing of Resharder without one.

    `plugins`: others, each with a comma before it.
    """
    names = "resharder" if endpoint else ""
    environment = {"PYTHONPATH": _path(PLUGINS), "VLLM_PLUGINS": (names + plugins).strip(","), "RESHARDER_ENDPOINT": endpoint}
    environment |= options.pop("env", {})
    given = ["--skip-mm-profiling", *arguments, *(["--load-format", "resharder"] if endpoint else [])]
    # Not forked: what servers are forked from has looked for torchvision in vain.
    return VllmServer(folder, given, environment, python=str(Path(sys.executable).with_name("python3")), **options)


def save_processor(folder: Path, config: Mapping[str, Any]) -> Path:
    """config.json, and Qwen's processor with a tokenizer of the words `t0 t1 t2 …` and those that stand for images and videos."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", __name__, str(folder)]  # transformers looks for torchvision once in a process
    subprocess.run(command, env=os.environ | {"PYTHONPATH": _path(ROOT)}, check=True)
    return folder


def _path(*folders: Path) -> str:
    stand_in = [] if find_spec("torchvision") else [IMAGES]
    return os.pathsep.join([*map(str, (*stand_in, *folders)), *filter(None, [os.environ.get("PYTHONPATH")])])


def _save_processor(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    kind = _KINDS.get(config["model_type"], _QWEN)
    kind.save(config, _tokenizer(config, kind), folder)


def _tokenizer(config: Mapping[str, Any], kind: "_Kind") -> PreTrainedTokenizerFast:
    """Token `i` is the word `ti`, but for words of images and videos, bytes, which spaces become, and newlines, as Gemma's has.

    Words are added to tokens of bytes: whatever its files say, transformers takes Qwen3.5's tokenizer to be of bytes.
    """
    words = [f"t{i}" for i in range(config["text_config"]["vocab_size"])]
    words[-300:-44] = alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words[-4:] = newlines = [n * "\n" for n in range(1, 5)]
    for key, word in kind.special.items():
        words[config[key]] = word
    tokens = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_tokens([word for word in words if word not in alphabet])
    named = {name: kind.special[key] for key, name in kind.named.items()}
    special = [*kind.special.values(), *newlines]
    ends = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0", "unk_token": "t3"}
    found = PreTrainedTokenizerFast(tokenizer_object=tokens, additional_special_tokens=special, **ends, **named)
    found.chat_template = kind.template
    return found


def _save_qwen(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    vision, found = config["vision_config"], import_module("transformers")
    sizes = {"patch_size": vision["patch_size"], "merge_size": vision["spatial_merge_size"], "temporal_patch_size": 2}
    square = (vision["patch_size"] * vision["spatial_merge_size"]) ** 2
    sizes["size"] = {"shortest_edge": square, "longest_edge": 4096 * square}
    names = _PROCESSORS.get(config["model_type"], ("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor"))
    processor, images, videos = (getattr(found, name) for name in names)
    processor(images(**sizes), tokenizer, videos(**sizes)).save_pretrained(folder)


_PROCESSORS = {
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "glm4v_moe": ("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
}


def _save_gemma(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    found, side = import_module("transformers"), config["vision_config"]["image_size"]
    images = found.Gemma3ImageProcessor(size={"height": side, "width": side})
    found.Gemma3Processor(images, tokenizer, image_seq_length=config["mm_tokens_per_image"]).save_pretrained(folder)


def _save_kimi(config: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """vLLM's own processor reads the file of the checkpoint's."""
    vision = config["vision_config"]
    settings = {"patch_size": vision["patch_size"], "merge_kernel_size": vision["merge_kernel_size"]}
    settings |= {"temporal_merge_kernel_size": 4, "in_patch_limit": 4096, "patch_limit_on_one_side": 64}
    settings |= dict.fromkeys(("in_patch_limit_each_frame", "in_patch_limit_video", "fixed_output_tokens"))
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": settings}))
    tokenizer.save_pretrained(folder)


class _Kind(NamedTuple):
    """How a family's processor is written.

    Attributes:
        special: words that stand for images and videos, by the config's name of their token.
        named: attributes of the tokenizer that are such words.
        template: the chat template. With that of Qwen and others vLLM puts images on a line before the text.
    """

    save: Callable[[Mapping[str, Any], PreTrainedTokenizerFast, Path], None]
    special: Mapping[str, str]
    named: Mapping[str, str] = {}
    template: str = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


_QWEN = _Kind(
    _save_qwen,
    {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
)
_KINDS = {
    "glm4v_moe": _Kind(
        _save_qwen,
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
    ),
    "gemma3": _Kind(
        _save_gemma,
        {"image_token_index": "<image_soft_token>", "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        {"image_token_index": "image_token", "boi_token_index": "boi_token", "eoi_token_index": "eoi_token"},
        "{% for m in messages %}{% for part in m['content'] %}"
        "{{ part['text'] if part['type'] == 'text' else '<start_of_image>' }} {% endfor %}{% endfor %}",
    ),
    "kimi_k25": _Kind(
        _save_kimi,
        {"image_token_id": "<|media_pad|>", "vision_start_token_id": "<|media_begin|>", "vision_end_token_id": "<|media_end|>"},
    ),
}


def picture(seed: int, rows: int = 24, columns: int = 32) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (rows, columns, 3)).astype("uint8"))


def encoded(image: Image.Image) -> str:
    written = io.BytesIO()
    image.save(written, "PNG")
    return base64.b64encode(written.getvalue()).decode()


def image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(image)}"}}


def video_part(frames: Sequence[Image.Image]) -> dict[str, Any]:
    """Frames, as vLLM reads them from a comma-separated list."""
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(map(encoded, frames))}"}}


def ask(server: VllmServer, *parts: Mapping[str, Any], tokens: int = 8) -> Said:
    """A greedy answer to images and videos, then `TEXT`."""
    content = [*parts, {"type": "text", "text": TEXT}]
    asked = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0}
    response = server.request(
        "POST", "/v1/chat/completions", asked | {"logprobs": True, "return_token_ids": True, "ignore_eos": True}
    )
    if response.status != 200:
        raise ServerFailed(f"expected 200 for a chat, got {response.status}: {response.body[:500]!r}\n{server.log_tail()}")
    answer = response.json()
    choice = answer["choices"][0]
    logprobs = tuple(each["logprob"] for each in choice["logprobs"]["content"])
    return Said(tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"]), logprobs, response.version)


class VisionReference:
    """transformers' own model of a config with given weights, under the names on disk."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self._config = AutoConfig.for_model(**config)
        made = AutoModelForImageTextToText.from_pretrained(
            folder, config=self._config, dtype=torch.float32, attn_implementation="eager"
        )
        self._model = made.eval()

    @torch.no_grad()
    def logprobs(self, said: Said, image: Image.Image) -> list[float]:
        """Return the log-probability of each token of an answer to one image."""
        tokens = torch.tensor([[*said.prompt, *said.token_ids]])
        found = self._model(input_ids=tokens, **self._seen(tokens, image)).logits
        logprobs = found[0, len(said.prompt) - 1 : -1].log_softmax(-1)
        return [float(row[token]) for row, token in zip(logprobs, said.token_ids, strict=True)]

    def _seen(self, tokens: torch.Tensor, image: Image.Image) -> dict[str, torch.Tensor]:
        """The model's inputs besides the tokens."""
        vision = self._config.vision_config
        kinds = (tokens == self._config.image_token_id).int()
        if self._config.model_type == "gemma3":
            # Causal: vLLM's CPU attention lets an image's tokens see only those before them.
            return {"pixel_values": normalised(image, *_HALVES)[None], "token_type_ids": torch.zeros_like(tokens)}
        if self._config.model_type == "kimi_k25":
            pixels = normalised(image, *_HALVES).unfold(1, vision.patch_size, vision.patch_size)
            cut = pixels.unfold(2, vision.patch_size, vision.patch_size).permute(1, 2, 0, 3, 4)
            return {"pixel_values": cut.flatten(0, 1), "image_grid_thw": torch.tensor([[1, *cut.shape[:2]]])}
        pixels, grid = patches(image, vision)
        return {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}


def normalised(image: Image.Image, mean: Sequence[float], deviation: Sequence[float]) -> torch.Tensor:
    """[channels, rows, columns]."""
    middle, scale = (torch.tensor(each).view(3, 1, 1) for each in (mean, deviation))
    return (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - middle) / scale


def patches(image: Image.Image, vision: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An image as the tower takes it: patches, those of a square that is merged one after the other, each with all its frames;
    and the numbers of frames, rows and columns of patches."""
    size, merge, frames = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
    pixels = normalised(image, _MEAN, _DEVIATION)
    rows, columns = pixels.shape[1] // size, pixels.shape[2] // size
    cut = pixels.reshape(3, rows // merge, merge, size, columns // merge, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
    flat = cut.reshape(rows * columns, 3, 1, size, size).expand(-1, -1, frames, -1, -1).reshape(rows * columns, -1)
    return flat, torch.tensor([[1, rows, columns]])


_MEAN, _DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of each channel, by which Qwen2-VL's image processor normalises pixels; CLIP's."""
_HALVES = 2 * ((0.5, 0.5, 0.5),)
"""Mean and standard deviation of each channel, by which the image processors of Gemma 3 and Kimi-K2.5 normalise pixels."""


if __name__ == "__main__":
    _save_processor(Path(sys.argv[1]))
