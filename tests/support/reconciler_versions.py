"""Versions of a store, and settings, for tests of the reconciler."""

from resharder.server.state.server import Settings

STORE = "a store"


def fingerprint(version: int, store: str = STORE) -> str:
    return f"{version} of {store}" if version else ""


def versions(*numbers: int, store: str = STORE) -> dict[int, str]:
    return {number: fingerprint(number, store) for number in numbers}


SETTINGS = Settings(lease=10, grace=10, boot=100, install_step=50, attempts=3, first_retry=1, last_retry=4)
