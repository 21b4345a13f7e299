"""A file system in memory with a volatile and a durable part, as POSIX permits them to differ.

Data reaches the durable part by fsync of the file, a change of a folder by fsync of that folder; a rename is one change of both
folders. A power cut keeps any part of what was not synced: some blocks of a file, some changes of folders. Changes of one name
or of one file keep their order.
"""

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from types import SimpleNamespace

import numpy as np

ROOT = "/simulated"
FIRST_DESCRIPTOR = 1 << 20
_BLOCK = 64  # bytes that a disk writes or loses together
_WRITING = os.O_WRONLY | os.O_RDWR

Thing = tuple[int, str]  # number of a folder and a name in it; with an empty name, a file or folder itself


@dataclass(eq=False)
class Inode:
    """File or folder. `synced` and `durable` are what a power cut leaves at least."""

    number: int
    is_folder: bool
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    dirty: bool = False
    entries: dict[str, "Inode"] = field(default_factory=dict)
    durable: dict[str, "Inode"] = field(default_factory=dict)
    mapped: list[str] = field(default_factory=list)  # owners of maps
    mapped_for_writing: list[str] = field(default_factory=list)
    linked: bool = False  # whether it may have several names


@dataclass(eq=False)
class OpenFile:
    """Open file description of a process."""

    inode: Inode
    flags: int
    owner: str
    path: str
    leased: bool = False  # until another process opens the file for writing, which waits for nothing here

    @property
    def writes(self) -> bool:
        return bool(self.flags & _WRITING)


@dataclass(eq=False)
class Change:
    """Unsynced change of folders: the new inode of each name, or None if the name is gone."""

    entries: tuple[tuple[Inode, str, Inode | None], ...]
    folders: tuple[Inode, ...]
    things: frozenset[Thing]


class MappedArray(np.ndarray):
    """Map of a file; `close` ends the mapping."""

    _end: tuple["Inode", str, bool] | None = None

    def close(self) -> None:
        if self._end is not None:
            inode, owner, writable = self._end
            self._end = None
            for owners in (inode.mapped, inode.mapped_for_writing)[: 1 + writable]:
                if owner in owners:
                    owners.remove(owner)


class SimulatedFiles:
    """Folders and files below `ROOT`. Methods raise the OSErrors of the system calls of their names."""

    def __init__(self, random: Random, capacity: int) -> None:
        self.capacity, self._random = capacity, random
        self._numbers = 1
        self.root = Inode(1, True)
        self.changes: list[Change] = []
        self.open_files: dict[int, OpenFile] = {}
        self._next_descriptor = FIRST_DESCRIPTOR

    # Names

    def find(self, path: str) -> Inode:
        """Return the file or folder of a path."""
        found = self.root
        for part in _parts(path):
            if not found.is_folder:
                raise _error(errno.ENOTDIR, path)
            inode = found.entries.get(part)
            if inode is None:
                raise _error(errno.ENOENT, path)
            found = inode
        return found

    def _place(self, path: str) -> tuple[Inode, str]:
        folder, _, name = path.rpartition("/")
        if path == ROOT:
            return self.root, ""
        return self.find(folder), name

    def exists(self, path: str) -> bool:
        try:
            self.find(path)
        except OSError:
            return False
        return True

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, in an order of chance, or none if it is missing."""
        try:
            return self.listdir(path)
        except FileNotFoundError:
            return []

    def _change(self, *entries: tuple[Inode, str, Inode | None], moved: Inode | None = None) -> None:
        things = {(folder.number, name) for folder, name, _ in entries}
        for folder, name, inode in entries:
            replaced = folder.entries.get(name)
            things |= {(each.number, "") for each in (inode, replaced, moved) if each is not None}
            if inode is None:
                del folder.entries[name]
            else:
                folder.entries[name] = inode
        self.changes.append(Change(entries, tuple(folder for folder, _, _ in entries), frozenset(things)))

    def _new(self, folder: bool) -> Inode:
        self._numbers += 1
        return Inode(self._numbers, folder)

    # Folders

    def mkdir(self, path: str) -> None:
        parent, name = self._place(path)
        if name in parent.entries:
            raise _error(errno.EEXIST, path)
        self._change((parent, name, self._new(True)))

    def rmdir(self, path: str) -> None:
        parent, name = self._place(path)
        if self.find(path).entries:
            raise _error(errno.ENOTEMPTY, path)
        self._change((parent, name, None))

    def unlink(self, path: str) -> None:
        parent, name = self._place(path)
        if self.find(path).is_folder:
            raise _error(errno.EISDIR, path)
        self._change((parent, name, None))

    def link(self, source: str, target: str) -> None:
        inode, (parent, name) = self.find(source), self._place(target)
        if inode.is_folder:
            raise _error(errno.EPERM, source)
        if name in parent.entries:
            raise _error(errno.EEXIST, target)
        inode.linked, parent.entries[name] = True, inode
        # Its order among the changes of its other names is not that of this folder.
        self.changes.append(Change(((parent, name, inode),), (parent,), frozenset({(parent.number, name)})))

    def links(self, inode: Inode) -> int:
        """Return how many names a file has."""
        return sum(1 for _, each in self.walk() if each is inode) if inode.linked else 1

    def rename(self, source: str, target: str) -> None:
        moved = self.find(source)
        (old, old_name), (new, new_name) = self._place(source), self._place(target)
        there = new.entries.get(new_name)
        if there is moved:
            return
        if there is not None and there.is_folder:
            if not moved.is_folder:
                raise _error(errno.EISDIR, target)
            if there.entries:
                raise _error(errno.ENOTEMPTY, target)
        self._change((old, old_name, None), (new, new_name, moved), moved=moved)

    def listdir(self, path: str) -> list[str]:
        folder = self.find(path)
        if not folder.is_folder:
            raise _error(errno.ENOTDIR, path)
        names = list(folder.entries)
        self._random.shuffle(names)
        return names

    def stat(self, inode: Inode) -> SimpleNamespace:
        size = len(inode.data)
        mode = (stat.S_IFDIR | 0o700) if inode.is_folder else (stat.S_IFREG | 0o600)
        return SimpleNamespace(
            st_mode=mode,
            st_size=size,
            st_blocks=-(-size // 512),
            st_uid=os.geteuid(),
            st_blksize=4096,
            st_dev=1,
            st_ino=inode.number,
            st_nlink=self.links(inode),
        )

    # Space

    def used(self) -> int:
        """Bytes of all files that have a name."""
        found = {inode.number: len(inode.data) for _, inode in self.walk() if not inode.is_folder}
        return sum(found.values())

    def free(self) -> int:
        return max(0, self.capacity - self.used())

    def walk(self, path: str = ROOT) -> Iterator[tuple[str, Inode]]:
        """Yield the path of each file and folder below `path`."""
        for name, inode in self.find(path).entries.items():
            yield f"{path}/{name}", inode
            if inode.is_folder:
                yield from self.walk(f"{path}/{name}")

    # Files

    def open(self, path: str, flags: int, owner: str) -> int:
        parent, name = self._place(path)
        if not parent.is_folder:
            raise _error(errno.ENOTDIR, path)
        inode = parent.entries.get(name) if name else parent
        if inode is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            inode = self._new(False)
            self._change((parent, name, inode))
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        if inode.is_folder and flags & _WRITING:
            raise _error(errno.EISDIR, path)
        if flags & os.O_TRUNC:
            inode.data, inode.dirty = bytearray(), True
        if flags & _WRITING:
            self._break_leases(inode)
        self._next_descriptor += 1
        self.open_files[self._next_descriptor] = OpenFile(inode, flags, owner, path)
        return self._next_descriptor

    def _break_leases(self, inode: Inode) -> None:
        for each in self.open_files.values():
            each.leased = each.leased and each.inode is not inode

    def close(self, descriptor: int) -> None:
        if self.open_files.pop(descriptor, None) is None:
            raise _error(errno.EBADF, str(descriptor))

    def file(self, descriptor: int) -> OpenFile:
        found = self.open_files.get(descriptor)
        if found is None:
            raise _error(errno.EBADF, str(descriptor))
        return found

    def write(self, inode: Inode, content: bytes | memoryview, at: int) -> int:
        """Write at an offset, beyond the end too."""
        end = at + len(content)
        if end > len(inode.data):
            inode.data.extend(bytes(end - len(inode.data)))
        inode.data[at:end] = content
        inode.dirty = True
        return len(content)

    def truncate(self, inode: Inode, size: int) -> None:
        if size < len(inode.data):
            del inode.data[size:]
        elif size > len(inode.data):
            self.write(inode, bytes(size - len(inode.data)), len(inode.data))
        inode.dirty = True

    def map(self, inode: Inode, owner: str, writable: bool) -> MappedArray:
        array = np.frombuffer(inode.data, np.uint8).view(MappedArray)
        array._end = inode, owner, writable
        inode.mapped.append(owner)
        if writable:
            self._break_leases(inode)
            inode.mapped_for_writing.append(owner)
            inode.dirty = True
        else:
            array.flags.writeable = False
        return array

    def is_leasable(self, descriptor: int, exclusive: bool) -> bool:
        """Return whether fcntl grants a lease: no other open file or map (`exclusive`), or none for writing."""
        inode = self.file(descriptor).inode
        others = [each for number, each in self.open_files.items() if each.inode is inode and number != descriptor]
        if exclusive:
            return not others and not inode.mapped
        return not any(each.writes for each in others) and not inode.mapped_for_writing

    def end_process(self, owner: str) -> None:
        """Close the files and maps of a process."""
        for descriptor in [number for number, each in self.open_files.items() if each.owner == owner]:
            del self.open_files[descriptor]
        for _, inode in self._all():
            inode.mapped = [each for each in inode.mapped if each != owner]
            inode.mapped_for_writing = [each for each in inode.mapped_for_writing if each != owner]

    # Durability

    def fsync(self, inode: Inode) -> None:
        if inode.is_folder:
            self._sync_folder(inode)
        elif inode.dirty:
            inode.synced = bytes(inode.data)
            inode.dirty = bool(inode.mapped_for_writing)

    def fail_fsync(self, inode: Inode) -> None:
        """Drop the changes of a file from what is written later, as Linux does after a failed fsync; they can still be read."""
        if not inode.is_folder and not inode.mapped_for_writing and self._random.random() < 0.5:
            inode.dirty = False

    def _sync_folder(self, folder: Inode) -> None:
        due: set[Thing] = set()
        apply, left = [], []
        for change in reversed(self.changes):
            if folder in change.folders or not due.isdisjoint(change.things):
                due |= change.things
                apply.append(change)
            else:
                left.append(change)
        self.changes = left[::-1]
        for change in reversed(apply):
            _apply(change)

    def cut_power(self, chance: float | None = None) -> str:
        """Lose changes that were not synced, and return how many are left. `chance`: that of each to be left."""
        kept, style = 0, self._random.random()
        if chance is None:
            chance = 0.0 if style < 0.3 else 1.0 if style < 0.5 else self._random.random()
        prefix = self._random.random() < 0.5 and chance not in (0.0, 1.0)
        lost: set[Thing] = set()
        everything = len(self.changes)
        for place, change in enumerate(self.changes):
            keep = place < chance * everything if prefix else self._random.random() < chance
            if keep and not change.things & lost:
                _apply(change)
                kept += 1
            else:
                lost |= change.things
        self.changes = []
        self.open_files.clear()
        seen: set[int] = set()
        self._restart(self.root, chance, seen)
        return f"{kept} of {everything} changes of folders kept"

    def _restart(self, inode: Inode, chance: float, seen: set[int]) -> None:
        if inode.linked and inode.number in seen:
            return
        assert inode.number not in seen, "a file has two names: the model of renames is wrong"
        seen.add(inode.number)
        inode.mapped, inode.mapped_for_writing = [], []
        if not inode.is_folder:
            if inode.dirty or bytes(inode.data) != inode.synced:
                inode.data = self._torn(inode, chance)
            inode.synced, inode.dirty = bytes(inode.data), False
            return
        inode.entries = dict(inode.durable)
        for each in inode.entries.values():
            self._restart(each, chance, seen)

    def _torn(self, inode: Inode, chance: float) -> bytearray:
        """Return a mixture of blocks of the synced content and of the newest."""
        old, new = inode.synced, bytes(inode.data)
        if not inode.dirty:
            return bytearray(old)
        size = len(new) if self._random.random() < chance else len(old)
        mixed = bytearray(size)
        for at in range(0, size, _BLOCK):
            source = new if self._random.random() < chance else old
            block = source[at : min(at + _BLOCK, size)]
            mixed[at : at + len(block)] = block
        return mixed

    def _all(self) -> Iterator[tuple[str, Inode]]:
        yield from self.walk()
        for each in self.open_files.values():
            yield each.path, each.inode


@lru_cache(maxsize=4096)
def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path[len(ROOT) :].split("/") if part)


def _apply(change: Change) -> None:
    for folder, name, inode in change.entries:
        if inode is None:
            folder.durable.pop(name, None)
        else:
            folder.durable[name] = inode


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
