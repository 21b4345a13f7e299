"""State of a node's reservations and of the sets of files under them."""

from dataclasses import dataclass, field
from pathlib import Path

from resharder.converters.storage.files import FileLayout
from resharder.server.ingest.homes import FileProof
from resharder.server.ingest.released_files import EarlyDigests
from resharder.server.node.file_proofs import SetProof
from resharder.server.node.part_files import FilesOnNode


@dataclass
class FileSet:
    """A set. `version` names the version that has taken it; empty for a free one."""

    id: str
    folder: Path
    early: EarlyDigests[FileProof]
    version: str = ""
    own: FilesOnNode = field(default_factory=FilesOnNode)  # files that the version has here
    closed: set[str] = field(default_factory=set)  # files that ranks have closed
    sealed: bool = False  # whether all ranks have sealed, so that other nodes may fetch boxes of its parts
    sources: dict[str, str] = field(default_factory=dict)  # address of each node from which boxes are gathered
    proof: SetProof | None = None
    problem: str = ""  # reason for which it could not be verified
    unreachable: str = ""  # node that is the reason
    reported: bool = False  # whether the daemon has the proof, or the problem
    busy: bool = False  # whether a thread works on it
    ended: bool = False  # whether its version needs it no longer


@dataclass
class ReservedSets:
    """Files that versions of one epoch have here, and the sets of them. Guarded by the lock of `FileSets`."""

    id: str
    publisher: str
    layout: FilesOnNode | None = None  # None until the daemon has sent it
    sets: dict[str, FileSet] = field(default_factory=dict)
    making: int = 0  # sets that are being laid out, or cleaned to be used again
    problem: str = ""
    retry: float = 0.0
    ended: bool = False

    @property
    def own(self) -> FilesOnNode:
        """The files of a set; none until the daemon has sent their layout."""
        return self.layout or FilesOnNode()

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """The files of which the node is the home."""
        return self.own.files

    @property
    def size(self) -> int:
        """Bytes of a set."""
        return self.own.size
