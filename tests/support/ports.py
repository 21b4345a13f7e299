"""Ports that stay reserved, also while their listener is restarted."""

import random
import socket

_OURS = range(20_000, 29_000)  # below those that torch takes, and that Linux gives to connections and whoever asks for any
_random = random.SystemRandom()  # because a test's seed is the same in every process
_held: list[socket.socket] = []  # until this process ends


def free_port() -> int:
    """A TCP port of the loopback. Other test processes of this machine see by a socket's name that it is taken."""
    while True:
        port, name = _random.choice(_OURS), socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0resharder-test-port-{port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            name.close()
            continue
        _held.append(name)
        return port
