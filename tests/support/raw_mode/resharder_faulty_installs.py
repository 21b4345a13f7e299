"""A vLLM plugin for tests: installs take as long, and go as wrong, as the JSON file named by FAULTY_INSTALLS says.

    {"stage": 1.5, "apply": 1.5, "torn_after": 3}

Seconds; the installation of any version after this one ends in an error when a part of the weights is written. Every key may be
missing, and the file too.
"""

import json
import os
import time
from pathlib import Path


def register() -> None:
    from resharder.client.vllm.worker import Agent

    if "FAULTY_INSTALLS" in os.environ and Agent._stage.__name__ == "_stage":
        Agent._stage, Agent._install = slow(Agent._stage), faulty(Agent._install)


def slow(stage):  # type: ignore[no-untyped-def]
    def slow_stage(*args, **kwargs):  # type: ignore[no-untyped-def]
        time.sleep(said().get("stage", 0))
        return stage(*args, **kwargs)

    return slow_stage


def faulty(install):  # type: ignore[no-untyped-def]
    def faulty_install(agent, models, source):  # type: ignore[no-untyped-def]
        from resharder.client.vllm.install import InstallError

        faults = said()
        time.sleep(faults.get("apply", 0))
        if source.manifest.number > faults.get("torn_after", source.manifest.number):
            for model in models.values():
                next(model.parameters()).data.fill_(float("nan"))
            raise InstallError("torn half-way by the test")
        install(agent, models, source)

    return faulty_install


def said():  # type: ignore[no-untyped-def]
    file = Path(os.environ["FAULTY_INSTALLS"])
    return json.loads(file.read_text()) if file.is_file() else {}
