"""Cache of the manifests that were read last."""

from collections import OrderedDict

from resharder.server.store.manifest import Manifest

_MAX = 2  # a large one takes some 50 MiB


class ManifestCache:
    """Last two manifests of READY versions that were read. Callers must hold the lock of the catalogue."""

    def __init__(self) -> None:
        self._manifests: OrderedDict[tuple[str, int], Manifest] = OrderedDict()

    def get(self, model: str, number: int) -> Manifest | None:
        """Return a manifest, or None if it is not cached."""
        return self._manifests.get((model, number))

    def add(self, model: str, number: int, manifest: Manifest) -> None:
        """Add a manifest, in place of the oldest one if the cache is full."""
        self._manifests[model, number] = manifest
        while len(self._manifests) > _MAX:
            self._manifests.popitem(last=False)

    def remove(self, model: str, number: int) -> None:
        """Remove a manifest; a no-op if it is not cached."""
        self._manifests.pop((model, number), None)
