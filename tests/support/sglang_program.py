"""A program that embeds SGLang's engine, attached to a daemon: `python -m tests.support.sglang_program FOLDER VERSION`.

Prints as JSON what it answers on its first version, and then on VERSION, with the versions of each answer.
"""

import json
import sys
from typing import Any

PROMPT = [5, 17, 42, 7, 300, 11]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.6,
    "context_length": 512,
}


async def run(engine: Any, version: int) -> None:
    from resharder.client import attach_sglang

    handle = await attach_sglang(engine)
    for wanted in (1, version):
        await handle.wait(wanted, timeout=120)
        with handle.answering() as answer:
            found = await engine.async_generate(input_ids=PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 8})
        spans = found["meta_info"]["weight_versions"]
        print(json.dumps({"versions": answer.versions, "tokens": found["output_ids"], "spans": spans}), flush=True)
    handle.close()


def main() -> None:
    import sglang

    folder, version = sys.argv[1:]
    engine = sglang.Engine(model_path=folder, **OPTIONS)
    engine.loop.run_until_complete(run(engine, int(version)))
    engine.shutdown()


if __name__ == "__main__":
    main()
