"""Versions that a rank has begun, by which the daemon distinguishes a retry of a step from a late first attempt."""


class Attempts:
    """Attempts of a rank during the life of its process, over restarts of the daemon."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._begun = (-1, 0)  # step, number

    def registered(self, newest: int) -> None:
        """Record a registration.

        Args:
            newest: Number of the model's newest version. Versions up to the first registration belong to earlier processes.
        """
        if self._first is None:
            self._first = newest

    def begun(self, step: int, number: int) -> None:
        """Record that the daemon answered with version `number` of `step`, in any state."""
        self._begun = step, number

    def after(self, step: int) -> int:
        """Return `CreateVersionRequest.after` for a step."""
        begun, number = self._begun
        return max(self._first or 0, number if begun == step else 0)
