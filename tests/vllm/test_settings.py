"""What the plugin reads from its surroundings before anything else: RESHARDER_* variables and vLLM's own version."""

import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import vllm
from resharder.client import settings
from resharder.client.errors import UsageError
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.vllm import TESTED, in_words, register, show_log
from resharder.client.settings import FAULT

ENVIRONMENT = {"RESHARDER_ENDPOINT": "d:1", "RESHARDER_SERVER_ID": "s"}


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    given = {
        "RESHARDER_MODEL": "m",
        "RESHARDER_FLEET": "f",
        "RESHARDER_UNREACHABLE": "prefer",
        "RESHARDER_HOLD_SECONDS": "2.5",
        "RESHARDER_BOOT_WAIT_SECONDS": "0",
        "RESHARDER_TRANSPORT": "http",
        "RESHARDER_STAGING_DIR": str(tmp_path),
        "RESHARDER_DIRECT": "off",
        "RESHARDER_ADDRESS": "gpu-7:8000",
    }
    expected = PluginSettings("d:1", "s", "m", "f", True, 2.5, 0, "http", str(tmp_path), direct=False, address="gpu-7:8000")
    assert PluginSettings.from_environment(ENVIRONMENT | given) == expected
    assert PluginSettings.from_environment(ENVIRONMENT | dict.fromkeys(given, "")) == PluginSettings("d:1", "s")


def test_grpc_of_earlier_releases_is_read_as_http_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warned = list[str]()  # vLLM, once imported, arranges where logs go
    monkeypatch.setattr(settings.logger, "warning", lambda text, *values: warned.append(text % values))
    assert PluginSettings.from_environment(ENVIRONMENT | {"RESHARDER_TRANSPORT": "grpc"}).transport == "http"
    assert warned == ["RESHARDER_TRANSPORT=grpc is read as http: versions come from the daemon's data port alone. Set it to http"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RESHARDER_ENDPOINT": ""}, "RESHARDER_ENDPOINT is not set: set it to the daemon's host:port"),
        ({"RESHARDER_ENDPOINT": "daemon"}, "RESHARDER_ENDPOINT: expected host:port, got 'daemon'"),
        ({"RESHARDER_ENDPOINT": "daemon:77777"}, "RESHARDER_ENDPOINT: expected host:port, got 'daemon:77777'"),
        ({"RESHARDER_SERVER_ID": ""}, "expected the server's id in RESHARDER_SERVER_ID .*, got none"),
        ({"RESHARDER_SERVER_ID": "a/b"}, "expected the server's id in RESHARDER_SERVER_ID .*, got a/b"),
        ({"RESHARDER_MODEL": "models/m"}, "expected at most 64 letters, .* in RESHARDER_MODEL, got 'models/m'"),
        ({"RESHARDER_FLEET": "f" * 65}, "expected at most 64 letters, .* in RESHARDER_FLEET, got 'fff"),
        ({"RESHARDER_UNREACHABLE": "maybe"}, "expected require or prefer in RESHARDER_UNREACHABLE, got 'maybe'"),
        ({"RESHARDER_HOLD_SECONDS": "-1"}, "expected seconds in RESHARDER_HOLD_SECONDS, got '-1'"),
        ({"RESHARDER_HOLD_SECONDS": "inf"}, "expected seconds in RESHARDER_HOLD_SECONDS, got 'inf'"),
        ({"RESHARDER_BOOT_WAIT_SECONDS": "10min"}, "expected seconds of 0 to 3600 in RESHARDER_BOOT_WAIT_SECONDS, got '10min'"),
        ({"RESHARDER_BOOT_WAIT_SECONDS": "3601"}, "expected seconds of 0 to 3600 in RESHARDER_BOOT_WAIT_SECONDS, got '3601'"),
        ({"RESHARDER_TRANSPORT": "rdma"}, "expected nothing or http in RESHARDER_TRANSPORT, got 'rdma'"),
        ({"RESHARDER_STAGING_DIR": "/no/such"}, "expected a folder in RESHARDER_STAGING_DIR, got '/no/such'"),
        ({"RESHARDER_DIRECT": "yes"}, "expected on or off in RESHARDER_DIRECT, got 'yes'"),
        ({"RESHARDER_ADDRESS": "http://gpu-7"}, "expected a host or host:port in RESHARDER_ADDRESS, got 'http://gpu-7'"),
        (
            {"RESHARDER_ALLOW": "unwritten-parameters,everything"},
            "RESHARDER_ALLOW: no refusal is called everything; this release has .*unwritten-parameters",
        ),
        ({"RESHARDER_FAULT": "drop:a"}, "expected skip:NAME, .* in RESHARDER_FAULT, got 'drop:a'"),
    ],
)
def test_a_wrong_environment_is_refused_by_name(change: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PluginSettings.from_environment(ENVIRONMENT | change)


def test_faults_name_the_tensors_that_they_need() -> None:
    assert FAULT.read({}) == ("", ())
    assert FAULT.read({"RESHARDER_FAULT": "half-way"}) == ("half-way", ())
    assert FAULT.read({"RESHARDER_FAULT": "swap:a,b"}) == ("swap", ("a", "b"))
    for wrong in ("swap:a", "skip", "half-way:a"):
        with pytest.raises(UsageError, match=wrong):
            FAULT.read({"RESHARDER_FAULT": wrong})


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process of a server that is about to call the plugin."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "RESHARDER_")
    monkeypatch.setenv("RESHARDER_WARNED_OF_VLLM", "")
    return monkeypatch


def test_a_server_with_a_wrong_environment_does_not_start(starting: pytest.MonkeyPatch) -> None:
    starting.setenv("RESHARDER_BOOT_WAIT_SECONDS", "soon")
    with pytest.raises(UsageError, match="RESHARDER_BOOT_WAIT_SECONDS"):
        register()


def test_releases_are_named_by_the_first_and_the_last_of_those_that_follow_each_other() -> None:
    assert in_words([(0, 30)]) == "0.30"
    assert in_words([(0, 28), (0, 29)]) == "0.28 and 0.29"
    assert in_words([(0, 26), (0, 28), (0, 30), (0, 31), (0, 32)]) == "0.26, 0.28 and 0.30 to 0.32"


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2+cpu"])
def test_a_vllm_without_endpoint_plugins_is_refused(starting: pytest.MonkeyPatch, version: str) -> None:
    starting.setattr(vllm, "__version__", version)
    with pytest.raises(UsageError) as caught:
        register()
    supported = "this release of Resharder supports vLLM 0.26 and later, and is tested with "
    assert str(caught.value).startswith(f"vLLM {version} is not supported: {supported}")
    assert str(caught.value).endswith(f"{in_words(TESTED)}. Install one of these")


def test_the_code_that_engines_share_logs_as_vllm_does(caplog: pytest.LogCaptureFixture) -> None:
    vllms, shared = logging.getLogger("vllm"), logging.getLogger("resharder.inference.control")
    show_log()
    vllms.addHandler(caplog.handler)
    try:
        shared.warning("an order came")
    finally:
        vllms.removeHandler(caplog.handler)
    assert "an order came" in caplog.messages
    assert shared.getEffectiveLevel() == vllms.getEffectiveLevel()


@pytest.mark.parametrize("version", ["0.27.0", "0.99.1rc1", "1.0.0", "0.1.dev1+g0123abc", "dev"])
def test_an_untested_vllm_is_warned_of_once_by_all_processes_of_a_server(
    starting: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    starting.setattr(vllm, "__version__", version)
    starting.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "vllm.resharder")  # other tests have vLLM build an application, which raises the root's
    register()
    register()  # as a process does that inherits the environment
    records = dict.fromkeys(caplog.records)  # one that two loggers hand to pytest is one
    assert [record.message for record in records if record.name == "vllm.resharder"] == [
        f"vLLM {version} is not tested with this release of Resharder, which is tested with {in_words(TESTED)}"
    ]
    assert os.environ["RESHARDER_WARNED_OF_VLLM"] == version


@pytest.mark.parametrize("version", ["0.26.0", "0.28.3+cpu", "0.32.0.dev7+g0123abc"])
def test_a_tested_vllm_is_not_warned_of(starting: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str) -> None:
    starting.setattr(vllm, "__version__", version)
    starting.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "vllm.resharder")  # other tests have vLLM build an application, which raises the root's
    register()
    assert not [record for record in caplog.records if record.name == "vllm.resharder"]


def test_the_vllm_that_the_tests_run_in_is_a_tested_one(starting: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    starting.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "vllm.resharder")  # other tests have vLLM build an application, which raises the root's
    register()
    assert not [record for record in caplog.records if record.name == "vllm.resharder"]


def test_the_folder_for_slices_is_checked_where_no_other_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "STAGING_DIR", replace(settings.STAGING_DIR, unset="/no/such"))
    with pytest.raises(UsageError, match="expected a folder in RESHARDER_STAGING_DIR, got '/no/such'"):
        PluginSettings.from_environment(ENVIRONMENT)
