"""The fingerprints that an adapter's agent keeps of versions that it has entered."""

from pathlib import Path

from resharder.client.inference.engine import SleepState
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.version_page import Page
from resharder.client.inference.worker.adapter_agent import AdapterAgent, Loaded


def test_a_number_that_may_have_been_another_versions_resets_caches_even_when_it_is_long_ago(tmp_path: Path) -> None:
    page, cuts = Page(tmp_path / "page"), Page(tmp_path / "cuts")
    settings = PluginSettings("127.0.0.1:1", "one.lora", model="lora")
    agent = AdapterAgent(0, 0, None, settings, page, cuts, SleepState(), None)  # type: ignore[arg-type]

    def renumbered(number: int, fingerprint: str) -> bool:
        return agent._renumbered(Loaded(number, fingerprint, 0))

    assert not any(renumbered(number, f"first {number}") for number in range(1, 400))
    assert len(agent._known) < 300
    assert not renumbered(398, "first 398"), "a rollback"
    assert renumbered(398, "second 398"), "of another store"
    assert renumbered(1, "second 1"), "of another store, after so many that the first one is forgotten"
    assert not renumbered(400, "first 400")
