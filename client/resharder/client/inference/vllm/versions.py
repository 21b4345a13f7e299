"""Which vLLM this plugin runs in. Asked before anything of vLLM's inside is imported: an older one may not have it."""

import re

OLDEST = (0, 26)  # endpoint plugins are there from here on
TESTED = (OLDEST, (0, 28), (0, 32))


def minor_of(version: str) -> tuple[int, int] | None:
    """(0, 32) of 0.32.0+cpu; None for a build that does not know, as one from a clone without tags (0.1.dev1+g123)."""
    found = re.match(r"(\d+)\.(\d+)(?!\.?dev)", version)
    return (int(found[1]), int(found[2])) if found else None


def too_old(version: str) -> str:
    """Why the plugin does not run in this vLLM; empty if it does."""
    minor = minor_of(version)
    if minor is None or minor >= OLDEST:
        return ""
    return f"expected vLLM {_text(OLDEST)} or later, got {version}"


def untested(version: str) -> str:
    """What to warn of; empty for a vLLM that the plugin's tests run in."""
    if minor_of(version) in TESTED:
        return ""
    return f"Resharder is tested with vLLM {', '.join(map(_text, TESTED))}, and this is {version}"


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
