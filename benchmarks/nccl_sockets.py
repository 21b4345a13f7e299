"""A benchmark over NCCL's sockets alone, as between hosts without RDMA: `python -m benchmarks.nccl_sockets MODULE [ARGUMENTS]`.

On two GPUs of one host, NCCL's transports within a host, its RDMA and peer memory are switched off. NCCL's logs then have to
name the socket transport and no other. The daemon's and the benchmark's own checks are as ever:

    python -m benchmarks.nccl_sockets direct_path --half --only Qwen3-8B --rounds 1 --seconds 400
    python -m benchmarks.nccl_sockets direct_install --each 1 --gpus 0,1 --only Qwen3-8B --rounds 1 --ahead 0 --staged 0
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

OFF = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "RESHARDER_PEER_MEMORY": "off",
}
_CHANNEL, _INTERFACE = re.compile(r"Channel .* via (\S+)"), re.compile(r"NET/Socket : Using (.*)")


def transports(logs: list[str]) -> tuple[Counter[str], set[str]]:
    """Return the channels by transport (`P2P`, `SHM`, `NET/Socket`), and the interfaces that sockets use, from NCCL's logs."""
    found, interfaces = Counter[str](), set[str]()
    for log in logs:
        found.update(
            "/".join(name.split("/")[:2]) if name.startswith("NET") else name.split("/")[0] for name in _CHANNEL.findall(log)
        )
        interfaces.update(each.strip() for each in _INTERFACE.findall(log))
    return found, interfaces


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    module, arguments = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        logging = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
        status = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments], env=os.environ | OFF | logging
        ).returncode
        found, interfaces = transports([path.read_text(errors="replace") for path in Path(folder).iterdir()])
    print(f"NCCL's channels: {dict(found)}; interfaces of sockets: {', '.join(sorted(interfaces)) or 'none'}", flush=True)
    if status:
        sys.exit(status)
    if found.keys() != {"NET/Socket"}:
        sys.exit("expected channels over NET/Socket alone")


if __name__ == "__main__":
    main()
