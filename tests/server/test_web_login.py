"""The status page with a token: a real Chromium asks for a password, and shows the pages that it opens.

Nobody types here: the first address has the password in it, so that Chromium has an answer when the daemon asks. It keeps that
for the daemon's realm, as it does what a person types, and every address after it has none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from tests.support.browser import browser, needs_browser, text
from tests.support.observing import wait_until
from tests.support.ports import free_port
from tests.support.secure import Authority, SecureDaemon

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

TOKEN, OTHER = "the token of somebody who looks", "the token of a trainer"
ROLES = {"token:grafana": ["viewer"], "token:trainer": ["publisher:policy"]}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureDaemon]:
    needs_browser()
    authority = Authority(tmp_path_factory.mktemp("login") / "tls")
    authority.allow(grafana=TOKEN, trainer=OTHER)
    with SecureDaemon(authority, ROLES, certificates=False, web_listen=f"127.0.0.1:{free_port()}") as running:
        yield running


@pytest.fixture
def page(tmp_path: Path) -> "Iterator[Chrome]":
    """Another one for each test: browsers keep a password until they end."""
    needs_browser()
    with browser(tmp_path / "profile", any_authority=True) as made:
        yield made


def type_password(page: "Chrome", daemon: SecureDaemon, password: str) -> None:
    page.get(f"https://anybody:{quote(password)}@{daemon.options['web_listen']}/metrics")


def open_page(page: "Chrome", daemon: SecureDaemon) -> None:
    page.get(f"https://{daemon.options['web_listen']}/")


def test_a_token_is_the_password_of_the_page_and_of_all_that_it_asks_for(page: "Chrome", daemon: SecureDaemon) -> None:
    type_password(page, daemon, TOKEN)
    assert "resharder_build_info" in text(page, "body")
    open_page(page, daemon)
    wait_until(lambda: text(page, "#link") == "live", "the page is drawn")
    assert "started" in text(page, "#events")
    assert page.current_url == f"https://{daemon.options['web_listen']}/"
    kept = "return [document.cookie, ...Object.keys(localStorage), ...Object.keys(sessionStorage)]"
    assert page.execute_script(kept) == [""], "no script has it"


@pytest.mark.parametrize("password", ["", "the token of nobody"], ids=["none", "a wrong one"])
def test_without_a_token_that_the_daemon_knows_nothing_is_shown(page: "Chrome", daemon: SecureDaemon, password: str) -> None:
    if password:
        type_password(page, daemon, password)
        assert "resharder_build_info" not in text(page, "body")
    open_page(page, daemon)
    assert text(page, "#link") == ""
    assert "Resharder" not in page.title + text(page, "body")


def test_a_token_that_may_not_look_is_told_so(page: "Chrome", daemon: SecureDaemon) -> None:
    type_password(page, daemon, OTHER)
    open_page(page, daemon)
    assert "token:trainer@web may not read the status: expected a role of viewer, got publisher:policy" in text(page, "body")


@pytest.mark.full
def test_a_page_whose_token_is_taken_away_shows_nothing_new(page: "Chrome", daemon: SecureDaemon) -> None:
    type_password(page, daemon, TOKEN)
    open_page(page, daemon)
    wait_until(lambda: text(page, "#link") == "live", "the page is drawn")
    try:
        daemon.authority.allow(trainer=OTHER)
        wait_until(lambda: "below is what was known then" in text(page, "#away"), "the page says so")
    finally:
        daemon.authority.allow(grafana=TOKEN, trainer=OTHER)
