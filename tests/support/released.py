"""Releases of files that are closed at once, and reported to nobody."""

from collections.abc import Callable


class ImmediateReleases:
    def __init__(self) -> None:
        self.files: list[str] = []

    def release(self, file: str, close: Callable[[], None]) -> None:
        close()
        self.files.append(file)
