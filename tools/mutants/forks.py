"""Edits tried in forks of a process that has collected the tests: an edit then costs its tests, and no import."""

import gc
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tools.mutants.edits import Mutant

Function = tuple[str, str, int]
"""File, qualified name and first line."""
_OPTIMIZED = 0x1  # flag of the code of functions; bodies of modules and classes do not have it


def edited_functions(mutant: Mutant) -> dict[Function, CodeType] | None:
    """Return the functions that an edit changes, each with its new code; None if the edit changes code that runs at import."""
    name = str(mutant.file)
    return _different(compile(mutant.file.read_bytes(), name, "exec"), compile(mutant.source, name, "exec"))


def _different(old: CodeType, new: CodeType) -> dict[Function, CodeType] | None:
    if _itself(old) != _itself(new):
        return None
    found: dict[Function, CodeType] = {}
    for one, other in zip(_inner(old), _inner(new), strict=True):
        inside = _different(one, other)
        if one.co_flags & _OPTIMIZED:
            if inside != {}:
                found[_function(one)] = other
        elif inside is None:
            return None
        else:
            found |= inside
    return found


def _itself(code: CodeType) -> tuple[Any, ...]:
    """Return a code without its lines and without the functions inside."""
    constants = [("code", each.co_name) if isinstance(each, CodeType) else (type(each), repr(each)) for each in code.co_consts]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_exceptiontable, code.co_flags, code.co_argcount, code.co_kwonlyargcount, names, constants


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _function(code: CodeType) -> Function:
    return code.co_filename, code.co_qualname, code.co_firstlineno


class Forks:
    """Plugin of pytest that collects the tests and, in place of running them, tries edits in forks.

    It writes a JSON line (number of the edit, status of its process, seconds) for each edit that it tries. Tests that failed for
    earlier edits come first. It leaves out edits of code
    that ran at import or while tests were collected, which need a process without that code.
    """

    def __init__(
        self,
        wanted: Sequence[Mutant],
        files: set[str],
        tests: Callable[[Mutant], Sequence[str]],
        each: Callable[[Sequence[Mutant], Callable[[Mutant], int]], Iterator[tuple[Mutant, int, float]]],
        out: int,
    ) -> None:
        self._wanted, self._files, self._tests, self._each, self._out = wanted, files, tests, each, out
        self._ran: set[Function] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename in self._files:
            self._ran.add(_function(frame.f_code))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        functions: dict[Function, list[FunctionType]] = {}
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename in self._files:
                functions.setdefault(_function(found.__code__), []).append(found)
        codes = {}
        for number, mutant in enumerate(self._wanted):
            edited = edited_functions(mutant)
            if edited and all(one in functions and one not in self._ran for one in edited):
                codes[number] = [(one, code) for name, code in edited.items() for one in functions[name]]
        numbers = {self._wanted[number].name: number for number in codes}
        items = {item.nodeid: item for item in session.items}
        gc.collect()
        gc.freeze()

        folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        killer = Path(f"{folders._given_basetemp}-killer")
        killers: dict[str, None] = {}  # tests that failed for an edit, the last one at the end: they come first

        def start(mutant: Mutant) -> int:
            if killer.exists():
                killers.pop(last := killer.read_text(), None)
                killers[last] = None
            child = os.fork()
            if not child:
                for function, code in codes[numbers[mutant.name]]:
                    function.__code__ = code
                nodes = [node for node in self._tests(mutant) if node in items]
                recent = {node: -place for place, node in enumerate(killers, 1)}
                nodes.sort(key=lambda node: recent.get(node, 0))
                _run(session, [items[node] for node in nodes], killer)
            return child

        for mutant, status, seconds in self._each([self._wanted[number] for number in codes], start):
            os.write(self._out, json.dumps([numbers[mutant.name], status, seconds]).encode() + b"\n")
        return True


def _run(session: pytest.Session, items: Sequence[pytest.Item], killer: Path) -> None:
    """Run tests up to the first that fails, whose name goes to the file `killer`, and end the process with 0 where all pass."""
    session.config.pluginmanager.unregister(name="terminalreporter")
    folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folders._given_basetemp = Path(f"{folders._given_basetemp}-{os.getpid()}")
    status = 1
    try:
        for place, item in enumerate(items):
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=(*items[place + 1 :], None)[0])
            if session.testsfailed:
                killer.write_text(item.nodeid)
                break
        else:
            status = 0
    finally:
        try:
            session._setupstate.teardown_exact(None)
            shutil.rmtree(folders._given_basetemp, ignore_errors=True)
        finally:
            os._exit(status)
