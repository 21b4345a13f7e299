"""Key-value stores by which the members of a group form communicators, as `torch.distributed` does."""

from resharder.server.direct.exchange import Exchange
from resharder.server.infra.change_signal import Waiting
from resharder.server.state.errors import FailedPrecondition, ResourceExhausted

_KEYS, _KEY_BYTES, _ALL_KEYS_BYTES = 4096, 1 << 16, 16 << 20


class KeyStore:
    """Keys of all groups, which end with them. Thread-safe."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def set(self, id: str, key: str, value: bytes) -> None:
        """Set a key of a group. Raises FailedPrecondition (NOT_OFFERED), ResourceExhausted (TOO_MANY_KEYS)."""
        with self._exchange.lock:
            group = self._exchange.group(id)
            others = [len(known) for name, known in group.keys.items() if name != key]
            large = len(value) > _KEY_BYTES or len(key) > 1024
            if large or len(others) >= _KEYS or sum(others) + len(value) > _ALL_KEYS_BYTES:
                raise ResourceExhausted(
                    "TOO_MANY_KEYS",
                    f"expected at most {_KEYS} keys of {_KEY_BYTES} bytes, {_ALL_KEYS_BYTES} in all, got {len(value)} bytes more "
                    f"of group {id}",
                )
            group.keys[key] = value
            self._exchange.changed.notify()

    def get(self, id: str, key: str, wait_seconds: float) -> Waiting[bytes | None]:
        """Return the value of a key; None if it is not set in time.

        Raises FailedPrecondition (NOT_OFFERED) after the group's end.
        """
        exchange = self._exchange
        deadline = exchange.clock() + wait_seconds
        while True:
            seen = exchange.changed.count
            with exchange.lock:
                group = exchange.group(id)
                if group.error:
                    raise FailedPrecondition("NOT_OFFERED", f"group {id} is over: {group.error}")
                left = deadline - exchange.clock()
                if key in group.keys or left <= 0:
                    return group.keys.get(key)
            yield exchange.changed.pause(seen, min(left, 1.0))
