"""Calls that are made again."""

import random

from resharder.client.rpc.channel import Backoff


def test_waiting_leaves_the_random_numbers_of_a_trainer_alone() -> None:
    before, backoff = random.getstate(), Backoff(patience=0.05, first=0.01)
    while backoff.wait():
        pass
    assert random.getstate() == before
