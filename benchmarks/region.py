"""A step in another region, as a delta and in full: `python -m benchmarks.region [--gigabytes 0.4] [--rate 1gbit]`.

A model takes real AdamW steps (`benchmarks.delta`). They are published to a daemon that archives them in a bucket, an S3 server
on this host. A daemon behind a link of the given rate, in a network namespace, follows the bucket; a simulated server of its own
serves what it orders. Measured is the time from `publish` until that server serves the version, and the bytes over the link,
first with deltas and then with `archive_full_every` 1. Needs root and iproute2, and some 8 times the model's bytes in memory.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from urllib.request import Request, urlopen

import numpy as np
import torch
from resharder.client import connect
from resharder.client.operator import Operator
from rich.console import Console
from rich.table import Table

from benchmarks.delta import steps_of
from tests.support.daemon import Daemon
from tests.support.namespaces import Hosts, unavailable
from tests.support.ports import free_port
from tests.support.simulated_server import SimulatedServer

CONFIG = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"], "hidden_size": 32}
TENSOR = 32 << 20  # elements of a tensor at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.4, help="BF16 weights of the model, about")
    parser.add_argument("--rate", default="1gbit", help="rate of the link, as `tc` writes it")
    parser.add_argument("--learning-rate", type=float, default=3e-6)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--measured", type=int, default=4, help="steps that are measured, the last ones")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if why := unavailable():
        sys.exit(f"benchmarks.region: {why}")
    weights = list(steps_of(arguments.gigabytes, arguments.learning_rate, arguments.steps, arguments.measured + 1))
    rows = []
    for way, full_every in (("delta", 16), ("in full", 1)):
        with Hosts(1, rate=arguments.rate) as hosts, bucket(hosts.address) as environment:
            rows.append({"way": way} | measured(hosts, environment, weights, full_every))
    table = Table(
        "way", "version", "over the link", "publish to READY at home", "to archived", "to READY there", "to served there"
    )
    for row in rows:
        table.add_row(
            str(row["way"]),
            f"{row['size'] / 1e9:.2f} GB",
            f"{row['sent'] / 1e6:.1f} MB",
            f"{row['ready']:.2f} s",
            f"{row['archived']:.2f} s",
            f"{row['there']:.2f} s",
            f"{row['served']:.2f} s",
        )
    Console(width=120).print(table)
    delta, full = rows
    print(
        f"served {full['served'] / delta['served']:.1f} times sooner, with {full['sent'] / delta['sent']:.1f} times fewer bytes"
    )
    link = full["size"] * 8 / bits_per_second(arguments.rate)
    times = link / delta["served"]
    print(f"the link alone takes {link:.1f} s for a whole version, {times:.1f} times as long as a delta until it is served")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


def bits_per_second(rate: str) -> float:
    """Return a rate of `tc` in bit/s, such as that of 1gbit."""
    number, unit = re.fullmatch(r"([\d.]+)([kmg]?)bit", rate).groups()  # type: ignore[union-attr]
    return float(number) * 1000 ** " kmg".index(unit or " ")


@contextmanager
def bucket(address: str) -> Iterator[dict[str, str]]:
    """Run an S3 server with an empty bucket, and yield the environment that names it."""
    endpoint = f"http://{address}:{free_port()}"
    host, _, port = endpoint.removeprefix("http://").partition(":")
    quiet = "import logging; logging.getLogger('werkzeug').disabled = True; from moto.server import main; main()"
    server = subprocess.Popen([sys.executable, "-c", quiet, "-H", host, "-p", port], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urlopen(Request(f"{endpoint}/versions", method="PUT")).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
    finally:
        server.kill()
        server.wait()


def measured(hosts: Hosts, environment: dict[str, str], weights: list[np.ndarray], full_every: int) -> dict[str, float]:
    url = "s3://versions/here"
    home = Daemon(archive_url=url, archive_every=1, archive_full_every=full_every, archive_keep=1, keep_count=2)
    region = Daemon(host=hosts.address_of(0), command=tuple(hosts.command(0)), follow=url, keep_count=2, insecure=True)
    for daemon in (home, region):
        daemon.environment |= environment
    times: dict[str, list[float]] = {"ready": [], "archived": [], "there": [], "served": [], "sent": []}
    try:
        home.start()
        publisher = connect(home.endpoint, model="policy", job="region", rank=0, world_size=1, config=CONFIG)
        tensors = tensors_of(weights[0])
        publisher.attach_tensors([(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()])
        publisher.publish_tensors(0, tensors.items()).wait_ready(300)
        region.start()
        with SimulatedServer(region, "there"), Operator(region.endpoint) as operator, Operator(home.endpoint) as at_home:
            until(lambda: served(operator) == 1)
            for step, each in enumerate(weights[1:], start=1):
                time.sleep(3)  # the archive is at rest
                before, began, wall = hosts.received_bytes(0), time.monotonic(), time.time()
                publisher.publish_tensors(step, tensors_of(each).items()).wait_ready(300)
                times["ready"].append(time.monotonic() - began)
                until(
                    lambda number=step + 1: any(
                        v.number == number for v in operator.versions("policy") if v.state.name == "READY"
                    )
                )
                times["there"].append(time.monotonic() - began)
                until(lambda number=step + 1: served(operator) == number)
                times["served"].append(time.monotonic() - began)
                times["sent"].append(hosts.received_bytes(0) - before)
                until(lambda number=step + 1: archived(at_home, number) > 0)
                times["archived"].append(archived(at_home, step + 1) - wall)
        publisher.close()
    finally:
        region.close()
        home.close()
    return {name: median(each) for name, each in times.items()} | {"size": float(weights[0].nbytes)}


def archived(operator: Operator, number: int) -> float:
    """Return the time at which a version was archived, in seconds since 1970; 0 if it was not yet."""
    found = operator.events(subject=f"models/policy/versions/{number}")
    return next((event.time.timestamp() for event in found if event.what == "archived" and event.time), 0.0)


def served(operator: Operator) -> int:
    return next((server.version for server in operator.servers()), 0)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("the region did not follow within 300 s")
        time.sleep(0.02)


def tensors_of(weights: np.ndarray) -> dict[str, torch.Tensor]:
    """Return BF16 tensors over the bytes of the weights."""
    flat = torch.from_numpy(weights).view(torch.bfloat16)
    parts = flat.split(TENSOR)
    return {f"part.{number}": part.view(-1, 64) if len(part) % 64 == 0 else part for number, part in enumerate(parts)}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    main()
