"""Send a trainer's weights to a vLLM server through vLLM's own weight transfer API, with Resharder as the backend.

The calls are those of vLLM's examples over HTTP (examples/rl/rlhf_http_ipc.py and rlhf_http_nccl.py of vLLM 0.32); only the
init info differs. Start a daemon and a server of the same model, with dummy weights:

    resharderd &
    export RESHARDER_ENDPOINT=127.0.0.1:7677 RESHARDER_MODEL=policy VLLM_PLUGINS=resharder
    RESHARDER_UNREACHABLE=prefer VLLM_SERVER_DEV_MODE=1 vllm serve MODEL_DIR --load-format dummy \
        --weight-transfer-config '{"backend": "resharder"}' &
    python examples/vllm_api/trainer.py MODEL_DIR --server http://127.0.0.1:8000

Prints one JSON line before and one after the transfer: the answers, the header, and vLLM's weight version.
"""

import argparse
import json
from typing import Any

import requests
import torch
from resharder.client import ResharderTrainerInitInfo
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

PROMPTS = ([5, 17, 42, 7], [11, 2, 9], [77, 77, 77])


def post(url: str, body: dict[str, Any] | None = None) -> requests.Response:
    response = requests.post(url, json=body, timeout=300)
    response.raise_for_status()
    return response


def answers(server: str, name: str) -> dict[str, Any]:
    """Return greedy answers and the versions that computed them."""
    settings = {"model": name, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    found = [post(f"{server}/v1/completions", settings | {"prompt": prompt}) for prompt in PROMPTS]
    return {
        "tokens": [one.json()["choices"][0]["token_ids"] for one in found],
        "header": sorted({one.headers["X-Resharder-Version"] for one in found}),
        "weight_version": requests.get(f"{server}/weight_info", timeout=60).json()["weight_version"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="model folder with safetensors files")
    parser.add_argument("--server", required=True, help="URL of the vLLM server")
    parser.add_argument("--name", default="m", help="the server's name of the model")
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    print(json.dumps(answers(options.server, options.name)), flush=True)

    engine = WeightTransferTrainerFactory.trainer_init(
        init_info=ResharderTrainerInitInfo(rank=0),
        client=HTTPVLLMWeightSyncClient(options.server),
        source=ModuleSource(model),
    )
    post(f"{options.server}/pause")
    engine.send_weights()
    post(f"{options.server}/resume")

    print(json.dumps(answers(options.server, options.name)), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
