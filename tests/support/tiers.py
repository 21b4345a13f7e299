"""The tier of a test, read from the code that it and its fixtures reach, and the guard that holds pure tests to it.

Nothing is listed by hand. A test is in the tier of the costliest thing in its reach: a rig says its own by a class attribute
`tier` (`Engine`, `VllmServer`, `Cycle`), and whatever starts a process is in `process`. Reach is what names say: globals,
imports inside functions, tables of functions, methods of classes and their bases. Code of tests and tools is followed; what they
name of the product, within its module. Where no name shows it, the guard fails the test, and `@pytest.mark.process` says it.
"""

import dis
import importlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

TIERS = ("pure", "process", "engine", "storm")
"""From the cheapest."""

_STARTS: dict[ModuleType, frozenset[str]] = {
    subprocess: frozenset({"Popen", "run", "call", "check_call", "check_output"}),
    os: frozenset({"fork", "forkpty", "posix_spawn", "posix_spawnp", "system"}),
    multiprocessing: frozenset({"Process", "Pool", "get_context"}),
}
_STARTERS = [getattr(module, name) for module, names in _STARTS.items() for name in names]
_FOLLOWED, _PRODUCT = ("tests.", "tools."), ("resharder.",)
_IMPORT = dis.opmap["IMPORT_NAME"]
_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"})


class Reach:
    """What code reaches, remembered: most tests share their rigs."""

    def __init__(self) -> None:
        self._known = dict[int, tuple[object, int]]()
        self._looked = dict[int, tuple[object, tuple[int, list[object]]]]()  # objects are held, so that no other one gets its id

    def tier(self, functions: Iterable[object]) -> str:
        return TIERS[max((self._of(each) for each in functions), default=0)]

    def _of(self, start: object) -> int:
        """The highest tier of anything that can be reached from `start`."""
        known = self._known.get(id(start))
        if known is None:
            found, seen, left = 0, set[int](), [start]
            while left and found < len(TIERS) - 1:
                thing = left.pop()
                if id(thing) in seen:
                    continue
                seen.add(id(thing))
                if id(thing) not in self._looked:
                    self._looked[id(thing)] = thing, _look(thing)
                _, (own, others) = self._looked[id(thing)]
                found = max(found, own)
                left += others
            known = self._known[id(start)] = (start, found)
        return known[1]


def _look(thing: Any) -> tuple[int, list[object]]:
    """The tier that this object is in by itself, and what it names."""
    if isinstance(thing, property):
        return 0, [thing.fget, thing.fset]
    if isinstance(thing, dict):
        return 0, list(thing.values())
    if isinstance(thing, (list, tuple, set, frozenset)):
        return 0, list(thing)
    if isinstance(thing, (staticmethod, classmethod, MethodType)):
        return 0, [thing.__func__]
    while hasattr(thing, "__wrapped__"):  # contextmanager, cache
        thing = thing.__wrapped__
    if hasattr(thing, "_get_wrapped_function"):  # a fixture
        thing = thing._get_wrapped_function()
    if isinstance(thing, partial):
        return 0, [thing.func]
    if isinstance(thing, type):
        tier = vars(thing).get("tier")
        own, others = TIERS.index(tier) if tier in TIERS else 0, [*vars(thing).values(), *thing.__bases__]
    elif isinstance(thing, FunctionType):
        own, others = _look_into(thing)
    else:
        return 0, [type(thing)]
    if _is_in(thing, _FOLLOWED):
        return own, others
    if _is_in(thing, _PRODUCT):
        return own, [each for each in others if getattr(each, "__module__", "") == thing.__module__]
    return 0, []


def _look_into(function: FunctionType) -> tuple[int, list[object]]:
    """What the code of a function starts by itself, and what it names."""
    starts, others = False, [*(function.__defaults__ or ())]
    others += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    for code in _codes(function.__code__):
        for named in _named(code, function.__globals__):
            if isinstance(named, ModuleType):
                starts |= not _STARTS.get(named, frozenset()).isdisjoint(code.co_names)
                if named.__name__.startswith(_FOLLOWED):
                    others += [vars(named)[attribute] for attribute in code.co_names if attribute in vars(named)]
            else:
                starts |= any(named is starter for starter in _STARTERS)
                others.append(named)
    return int(starts), others


def _is_in(thing: Any, modules: tuple[str, ...]) -> bool:
    return str(getattr(thing, "__module__", "")).startswith(modules)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _named(code: CodeType, variables: dict[str, Any]) -> Iterator[object]:
    """The globals that a function's code names, and what it imports of this repository's tests or of modules that start
    processes."""
    for name in code.co_names:
        if name in variables:
            yield variables[name]
    if _IMPORT not in code.co_code[::2]:  # most have none, and reading instructions takes a while
        return
    module: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = _imported(instruction.argval)
            if isinstance(module, ModuleType):
                yield module
        elif instruction.opname == "IMPORT_FROM" and hasattr(module, instruction.argval):
            yield getattr(module, instruction.argval)


def _imported(name: str) -> ModuleType | None:
    if name.startswith(_FOLLOWED):
        with suppress(ImportError, pytest.skip.Exception):  # of what this environment has not
            return importlib.import_module(name)
    return sys.modules.get(name)


def _importing() -> bool:
    """Whether a module is being imported: libraries ask `ldconfig` and `lscpu` then."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "importlib._bootstrap" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


class Guard:
    """Notices what a pure test starts, in threads of its own too; others may be left over from earlier tests."""

    def __init__(self) -> None:
        self._pure, self._others, self._started = False, set[threading.Thread](), list[str]()
        sys.addaudithook(self._hear)
        self._watch(multiprocessing.process.BaseProcess, "start")

    def begin(self, *, pure: bool) -> None:
        """Begin a test. vLLM may have been imported since the last one."""
        self._pure, self._others, self._started = pure, set(threading.enumerate()) - {threading.main_thread()}, []
        if core := sys.modules.get("vllm.v1.engine.core"):
            self._watch(core.EngineCore, "__init__")

    def end(self) -> None:
        self._pure = False

    def check(self) -> None:
        assert not self._started, f"a pure test may start no process, and this one started {'; '.join(self._started)}"

    def _watch(self, kind: Any, method: str) -> None:
        original = getattr(kind, method)
        if hasattr(original, "watched"):
            return

        def watched(self_: Any, *args: Any, **options: Any) -> Any:
            self._notice(kind.__name__)
            return original(self_, *args, **options)

        watched.watched = True  # type: ignore[attr-defined]
        setattr(kind, method, watched)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._pure and event in _EVENTS:
            self._notice(f"{event} {arguments[1]}" if event == "subprocess.Popen" else event)

    def _notice(self, what: str) -> None:
        if self._pure and threading.current_thread() not in self._others and not _importing():
            self._started.append(what)
            if threading.current_thread() is threading.main_thread():
                self.check()
