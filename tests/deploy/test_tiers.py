"""The tiers that tests are in: by what their code reaches, and what a pure one may not do."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from resharder.client.inference.control.gate import Gate
from resharder.server.fleets.canary_checks import Checks

from tests.support.daemon import Daemon
from tests.support.tiers import Guard, Reach
from tests.support.vllm_engine import Engine
from tests.support.whole_system import Run


def computes() -> int:
    return max(1, 2)


def runs_a_command() -> object:
    return subprocess.run(["true"])


def forks() -> int:
    return os.fork()


def names_a_constant_of_subprocess() -> int:
    return subprocess.PIPE


def starts_a_daemon() -> Daemon:
    return Daemon()


def imports_a_rig() -> object:
    from tests.support.node import Node

    return Node


class Site:
    def __init__(self) -> None:
        self.daemon = starts_a_daemon()


def uses_a_class() -> Site:
    return Site()


TABLE = {"daemon": partial(starts_a_daemon), "none": computes}


def uses_a_table(which: str) -> Any:
    return TABLE[which]


def boots_an_engine() -> object:
    return lambda: Engine, Daemon


def runs_the_system() -> object:
    return Run, Engine


@pytest.mark.parametrize(
    ("function", "tier"),
    [
        (computes, "pure"),
        (names_a_constant_of_subprocess, "pure"),
        (runs_a_command, "process"),
        (forks, "process"),
        (starts_a_daemon, "process"),
        (imports_a_rig, "process"),
        (uses_a_class, "process"),
        (uses_a_table, "process"),
        (boots_an_engine, "engine"),
        (runs_the_system, "storm"),
    ],
)
@pytest.mark.process
def test_a_test_is_in_the_tier_of_the_costliest_that_its_code_reaches(function: Callable[..., object], tier: str) -> None:
    assert Reach().tier([function]) == tier
    assert Reach().tier([computes, function]) == tier


@pytest.mark.process
def test_what_the_product_starts_counts_as_far_as_its_module_shows() -> None:
    assert Reach().tier([lambda: Checks]) == "process"
    assert Reach().tier([lambda: Gate]) == "pure"


@pytest.mark.process
def test_a_pure_test_that_starts_a_process_fails_where_it_does() -> None:
    guard = Guard()
    guard.begin(pure=True)
    try:
        with pytest.raises(AssertionError, match=r"a pure test may start no process, and this one started subprocess\.Popen"):
            subprocess.run([sys.executable, "-c", ""])
    finally:
        guard.end()
    with pytest.raises(AssertionError):
        guard.check()
    guard.begin(pure=False)
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0
