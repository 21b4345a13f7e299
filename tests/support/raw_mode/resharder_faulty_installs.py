"""A vLLM plugin for tests: installs stop, and go wrong, as the JSON file named by FAULTY_INSTALLS says.

    {"held": "stage", "torn_after": 3}

An install goes on from where it is held (`stage` or `apply`) when the file says so no longer; that of any version after the other
one ends in an error when a part of the weights is written. Every key may be missing, and the file too.
"""

import json
import os
import time
from pathlib import Path


def register() -> None:
    from resharder.client.inference.worker.agent import Agent

    if "FAULTY_INSTALLS" in os.environ and Agent._stage.__name__ == "_stage":
        Agent._stage, Agent._install = held(Agent._stage), faulty(Agent._install)


def held(stage):  # type: ignore[no-untyped-def]
    def held_stage(*args, **kwargs):  # type: ignore[no-untyped-def]
        wait_at("stage")
        return stage(*args, **kwargs)

    return held_stage


def faulty(install):  # type: ignore[no-untyped-def]
    def faulty_install(agent, models, staged, source):  # type: ignore[no-untyped-def]
        from resharder.client.inference.engine import InstallError

        wait_at("apply")
        if source.manifest.number > settings().get("torn_after", source.manifest.number):
            for model in models.values():
                next(model.parameters()).data.fill_(float("nan"))
            raise InstallError("torn half-way by the test")
        install(agent, models, staged, source)

    return faulty_install


def wait_at(where):  # type: ignore[no-untyped-def]
    while settings().get("held") == where:
        time.sleep(0.02)


def settings():  # type: ignore[no-untyped-def]
    try:
        return json.loads(Path(os.environ["FAULTY_INSTALLS"]).read_text())
    except FileNotFoundError:
        return {}
