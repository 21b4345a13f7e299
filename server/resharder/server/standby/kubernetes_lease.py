"""A lease in a Lease object of Kubernetes (`coordination.k8s.io/v1`). It needs the extra `kubernetes`.

`leaseTransitions` is the term. A change names the `resourceVersion` that it replaces, so the API server refuses all but one of
those who take the lease at once. Times in the object are for people: no daemon compares them with its clock.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx2
from lightkube import ApiError, Client, KubeConfig
from lightkube.core.exceptions import ConfigError, LoadResourceError
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from resharder.server.standby.lease import LeaseConflict, LeaseRecord

_NOT_FOUND, _CONFLICT = 404, 409


class KubernetesLease:
    """Store of one lease's record in a Lease object, which is made when there is none.

    Args:
        namespace: Its namespace.
        name: Its name.
        seconds: Duration of the lease, which the object shows; also bounds a call.
        config: The cluster and the identity; by default that of the pod, or of KUBECONFIG.
        wall: Seconds since 1970, which the object shows.

    Raises:
        OSError: There is no cluster to call.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        seconds: float,
        config: KubeConfig | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._namespace, self._name, self._seconds, self._wall = namespace, name, seconds, wall
        try:
            self._client = Client(
                config=config or KubeConfig.from_env(), namespace=namespace, timeout=httpx2.Timeout(seconds / 2)
            )
        except (ConfigError, LoadResourceError) as error:
            raise OSError(f"there is no cluster for the lease {namespace}/{name}: {error}") from error

    @property
    def place(self) -> str:
        """Name of the place, for messages."""
        return f"the lease {self._namespace}/{self._name}"

    def read(self) -> LeaseRecord | None:
        """Return the record; None before the first holder. Raises OSError."""
        try:
            return _record(self._call(lambda: self._client.get(Lease, self._name, namespace=self._namespace)))
        except FileNotFoundError:
            return None

    def write(self, before: LeaseRecord | None, after: LeaseRecord) -> LeaseRecord:
        """Replace the record. Raises LeaseConflict once another daemon holds the lease, or OSError.

        A change of the object by somebody else, such as of its labels, is no conflict.
        """
        try:
            return self._write(before, after)
        except LeaseConflict:
            found = self.read()
            if before is None or found is None or (found.term, found.holder) != (before.term, before.holder):
                raise
            if after.term != before.term:  # of a holder that has renewed it
                raise
            return self._write(replace(after, version=found.version), after)

    def _write(self, before: LeaseRecord | None, after: LeaseRecord) -> LeaseRecord:
        now = datetime.fromtimestamp(self._wall(), UTC)
        spec = LeaseSpec(
            holderIdentity=after.holder or None,
            leaseDurationSeconds=max(1, round(self._seconds)),
            leaseTransitions=after.term,
            renewTime=now,
        )
        version = before.version if before is not None else None
        made = Lease(metadata=ObjectMeta(name=self._name, namespace=self._namespace, resourceVersion=version), spec=spec)
        change = self._client.create if before is None else self._client.replace
        return replace(_record(self._call(lambda: change(made))), renewals=after.renewals)

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ApiError as error:
            if error.status.code == _CONFLICT:
                raise LeaseConflict(error.status.message or "it has changed") from error
            if error.status.code == _NOT_FOUND:
                raise FileNotFoundError(error.status.message) from error
            raise OSError(f"the API server answers {error.status.code}: {error.status.message}") from error
        except httpx2.HTTPError as error:
            raise OSError(f"the API server cannot be reached: {error}") from error


def _record(found: Lease) -> LeaseRecord:
    spec, version = found.spec or LeaseSpec(), (found.metadata.resourceVersion if found.metadata else None) or ""
    return LeaseRecord(spec.leaseTransitions or 0, spec.holderIdentity or "", 0, version)
