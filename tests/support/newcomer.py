"""A newcomer: types README.md and pages of docs/ in a bare environment, and compares each output with the page.

    tests/support/newcomer.sh

builds the wheel first. The pages' own commands make the environment; only these are replaced: the checkout by the wheel, the
index of torch by that of TORCH_INDEX if it is set (empty: none), README's `vllm serve` by the quickstart's command on another
port, and README's `daemon` by this host. Needs a network, two cores, 8 GiB, and the pages' ports and stores.
"""

import os
import shutil
import sys
import time
from pathlib import Path

from tests.support.shell_session import Session
from tests.support.typed_page import save_files, type_page

ROOT = Path(__file__).parents[2]
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STORES = (Path("/dev/shm/quickstart"), Path("/dev/shm/tutorial"), Path("/dev/shm/trl"))
SERVE = (
    "python -m vllm.entrypoints.openai.api_server --model policy-config --load-format resharder --port 8001 "
    "--dtype float32 --enforce-eager --kv-cache-memory-bytes 64M &"
)


def main() -> int:
    wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
    index = os.environ.get("TORCH_INDEX", TORCH_INDEX)
    replaced = {
        "'.[server,client]'": f"'{wheel}[server,client]'",
        f" --index-url {TORCH_INDEX}": f" --index-url {index}" if index else "",
        "vllm serve policy-config --load-format resharder &": SERVE,
        "daemon:7677": "127.0.0.1:7677",
        "examples/": f"{ROOT}/examples/",
    }
    found = type_session(folder / "start", ("docs/start.md", "README.md"), replaced, os.environ["PATH"], install=True)
    path = f"{folder}/start/env/bin:{os.environ['PATH']}"
    found += type_session(folder / "start", ("docs/frameworks.md",), replaced, path, install=True)
    for name in ("tutorial", "security"):
        found += type_session(folder / name, (f"docs/{name}.md",), replaced, path, install=False)
    print("\n".join(found) or "every command printed what its page says")
    return 1 if found else 0


def type_session(folder: Path, pages: tuple[str, ...], replaced: dict[str, str], path: str, *, install: bool) -> list[str]:
    """Type pages into one shell, and return the differences."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(("RESHARDER", "VLLM", "PYTHON"))}
    found: list[str] = []
    with Session(folder, environment | {"PATH": path}, folder / "log") as session:
        for name in pages:
            page, began = (ROOT / name).read_text(), time.monotonic()
            save_files(page, folder)
            for shown, typed in replaced.items():
                page = page.replace(shown, typed)
            found += (wrong := type_page(session, page, name, install=install))
            print("\n\n".join([f"{name}: {len(wrong)} differences, {time.monotonic() - began:.0f} s", *wrong]), flush=True)
    for store in STORES:
        shutil.rmtree(store, ignore_errors=True)
    return [f"output of the background commands: {folder}/log"] if found else []


if __name__ == "__main__":
    sys.exit(main())
