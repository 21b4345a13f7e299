"""A lease in a file on storage that all daemons share.

    <path>          the record, replaced by rename
    <path>.<term>   made by the one who takes a term, exclusively: a term has one holder. The last hundred are kept

No locks: on NFS, those of a host that died stay for as long as the server likes. A file is made exclusively, and renamed,
atomically there; one that is opened is read as the server has it.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from resharder.converters.json_input import is_text, parse_json
from resharder.server.infra.filesystem import make_folder, move, touching, write_file
from resharder.server.standby.lease import LeaseConflict, LeaseRecord

_KEPT = 100


class LeaseFile:
    """Store of one lease's record in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._skipped: set[int] = set()

    @property
    def place(self) -> str:
        """Name of the place, for messages."""
        return f"the lease in {self._path}"

    def read(self) -> LeaseRecord | None:
        """Return the record; None before the first holder. Raises OSError, also for a file that has no record."""
        with touching(self._path, "reading"):
            try:
                content = self._path.read_bytes()
            except FileNotFoundError:
                return None
        try:
            found = parse_json(content)
            term, holder, renewals = found["term"], found["holder"], found["renewals"]
            if type(term) is not int or type(renewals) is not int or not (holder == "" or is_text(holder)):
                raise ValueError("expected a term, a holder and renewals")
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(f"{self._path} has no lease ({error}): make sure that no daemon runs, and remove it") from error
        return LeaseRecord(term, holder, renewals)

    def write(self, before: LeaseRecord | None, after: LeaseRecord) -> LeaseRecord:
        """Replace the record. Raises LeaseConflict if another daemon has taken a later term, or OSError."""
        claimed = before is None or after.term != before.term
        if claimed:
            after = self._claim(after)
        found = self.read()
        if found is not None and found.term > (after.term - 1 if claimed else after.term):
            raise LeaseConflict(f"{found.holder or 'nobody'} has term {found.term}")
        content = json.dumps({"term": after.term, "holder": after.holder, "renewals": after.renewals}).encode()
        own = self._path.with_name(f"{self._path.name}.{after.term}.new")  # no other daemon writes it
        write_file(own, content)
        move(own, self._path)
        if claimed:
            with suppress(OSError):
                self._of(after.term - _KEPT).unlink()
        return after

    def _claim(self, record: LeaseRecord) -> LeaseRecord:
        """Make the file of a term. One whose maker has not written the record by the next attempt is skipped.

        Raises LeaseConflict.
        """
        make_folder(self._path.parent)
        for term in range(record.term, record.term + _KEPT):
            try:
                os.close(os.open(self._of(term), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                if term not in self._skipped:
                    self._skipped.add(term)
                    raise LeaseConflict(f"another daemon takes term {term}") from None
            else:
                return LeaseRecord(term, record.holder)
        raise LeaseConflict(f"all terms from {record.term} are taken")

    def _of(self, term: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{term}")
