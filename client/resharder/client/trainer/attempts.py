"""Which versions a rank has begun: what tells another try of a step from a late first one."""


class Attempts:
    """Kept for as long as the rank's process lives, over restarts of the daemon too."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._begun = (-1, 0)  # step, number

    def registered(self, newest: int) -> None:
        """`newest`: the model's newest version. Versions up to the first registration concern an earlier process."""
        if self._first is None:
            self._first = newest

    def begun(self, step: int, number: int) -> None:
        """The daemon has answered with this version, in whatever state."""
        self._begun = step, number

    def after(self, step: int) -> int:
        """As CreateVersionRequest has it."""
        begun, number = self._begun
        return max(self._first or 0, number if begun == step else 0)
