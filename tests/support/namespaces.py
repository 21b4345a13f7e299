"""Emulated hosts: network namespaces on one bridge, each with a link of a limited rate both ways. Needs root and iproute2.

with Hosts(2, rate="200mbit") as hosts:
    hosts.address, hosts.second_address     # of this process's own host, on the interface hosts.bridge
    subprocess.run(hosts.command(0, "ls"))  # on the first of the others

Traffic stays on the bridge, which has no way out of this machine. Names and addresses are of this process alone.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_NOWHERE = "02:00:00:00:00:00"  # the link address of no interface


def enter(namespace: str) -> None:
    """Move this thread, and those that it starts later, into a network namespace."""
    with open(namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def unavailable() -> str:
    """Return why hosts cannot be emulated here; empty if they can."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        return "expected root and iproute2"
    with_one = subprocess.run(["ip", "netns", "add", _name(0)], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", _name(0)], capture_output=True)
    return "" if with_one.returncode == 0 else f"no network namespaces: {with_one.stderr.strip()}"


def _name(number: int) -> str:
    return f"rh{os.getpid()}-{number}"


def _free_network() -> str:
    """Return the first three bytes of addresses of which no interface here has one: a process that was killed leaves its bridge.

    They are of the range for benchmarks of networks.
    """
    taken = subprocess.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True).stdout
    networks = (f"198.18.{(os.getpid() + number) % 256}" for number in range(256))
    return next(network for network in networks if f" {network}." not in taken)


class Hosts:
    """`count` hosts beside the one of this process, which has the bridge. `rate`: as `tc` writes it, such as `500mbit`."""

    def __init__(self, count: int, rate: str) -> None:
        self._count, self._rate = count, rate
        self.bridge = f"rh{os.getpid()}"
        self._network = _free_network()
        self.address, self.second_address = f"{self._network}.254", f"{self._network}.253"

    def command(self, host: int, *command: str) -> list[str]:
        """Return a command that runs `command` on a host."""
        return ["ip", "netns", "exec", _name(host), *command]

    def address_of(self, host: int) -> str:
        """Return the address of a host."""
        return f"{self._network}.{host + 1}"

    def sent_bytes(self, host: int) -> int:
        """Return the bytes that a host has sent over its link."""
        return int(Path(f"/sys/class/net/{self._link(host)}/statistics/rx_bytes").read_text())

    def received_bytes(self, host: int) -> int:
        """Return the bytes that a host has received over its link."""
        return int(Path(f"/sys/class/net/{self._link(host)}/statistics/tx_bytes").read_text())

    def _link(self, host: int) -> str:
        return f"{self.bridge}v{host}"

    def namespace(self, host: int) -> str:
        """Return the path of a host's network namespace, for `enter`."""
        return f"/run/netns/{_name(host)}"

    def add_interface(self, host: int, name: str, address: str) -> None:
        """Give a host a second interface, at which no other host reaches it."""
        _run("ip", "-n", _name(host), "link", "add", name, "type", "bridge")
        _run("ip", "-n", _name(host), "addr", "add", f"{address}/24", "dev", name)
        _run("ip", "-n", _name(host), "link", "set", name, "up")

    def cut(self, host: int, other: int) -> None:
        """Lose all packets between two hosts, without a word to either."""
        for one, at in ((host, other), (other, host)):
            _run("ip", "-n", _name(one), "neigh", "replace", self.address_of(at), "lladdr", _NOWHERE, "dev", "eth0")

    def mend(self, host: int, other: int) -> None:
        """End a cut."""
        for one, at in ((host, other), (other, host)):
            _run("ip", "-n", _name(one), "neigh", "del", self.address_of(at), "dev", "eth0")

    def lose(self, host: int) -> None:
        """Lose all packets from and to a host, as when it has no power."""
        _run("ip", "link", "set", self._link(host), "down")

    def block(self, host: int, address: str) -> None:
        """Let a host send nothing to an address."""
        _run("ip", "-n", _name(host), "route", "add", "unreachable", f"{address}/32")

    def __enter__(self) -> "Hosts":
        self.close()  # what a killed process with this id has left
        try:
            _run("ip", "link", "add", self.bridge, "type", "bridge")
            for address in (self.address, self.second_address):
                _run("ip", "addr", "add", f"{address}/24", "dev", self.bridge)
            _run("ip", "link", "set", self.bridge, "up")
            for number in range(self._count):
                self._add(number)
        except BaseException:
            self.close()
            raise
        return self

    def _add(self, number: int) -> None:
        name, link = _name(number), self._link(number)
        shaped = ("root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _run("ip", "link", "set", link, "master", self.bridge, "up")
        _run("ip", "-n", name, "addr", "add", f"{self.address_of(number)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run("ip", "-n", name, "link", "set", device, "up")
        _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shaped)
        _run("tc", "qdisc", "add", "dev", link, *shaped)

    def close(self) -> None:
        """Remove the hosts, with the processes' connections."""
        for number in range(self._count):
            subprocess.run(["ip", "link", "del", self._link(number)], capture_output=True)  # the kernel is late with it
            subprocess.run(["ip", "netns", "del", _name(number)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
