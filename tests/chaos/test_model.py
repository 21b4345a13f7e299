"""The model accepts a history without faults, and finds each kind of violation."""

from typing import Any

import pytest

from tests.chaos.book import Book, published


def test_a_run_without_faults_breaks_nothing() -> None:
    book = published(1)
    book.answer("1")
    book.publish(2)
    book.answer("1", "2", v1="1100", v2="0011")
    book.version(2, "READY")
    book.answer("2")
    book.version(1, "RETIRED")
    assert book.rules() == []


def test_a_token_of_another_version_is_found() -> None:
    book = published(1)
    book.answer("1", v1="1101")
    assert book.rules() == ["wrong token"]


def test_tokens_of_two_versions_in_the_wrong_order_are_found() -> None:
    book = published(1, 2)
    book.answer("1", "2", v1="0011", v2="1100")
    assert "wrong label" in book.rules()
    book = published(1, 2)
    book.answer("1", "2", v1="1010", v2="0101")
    assert book.rules() == ["wrong token"]


def test_an_answer_that_returns_to_its_first_version_is_right() -> None:
    book = published(1, 2)
    book.end(book.begin("rollback", pick=None), "rollback", wanted=1)
    book.answer("1", "2", v1="1001", v2="0110")
    assert book.rules() == []


def test_a_label_of_a_version_that_made_no_token_is_found() -> None:
    book = published(1, 2)
    book.answer("1", "2", v1="1111", v2="0000")
    assert book.rules() == ["wrong label"]


def test_a_label_of_no_version_is_found() -> None:
    for label in ("", "none", "7"):
        book = published(1)
        book.answer(label)
        assert book.rules() == ["wrong label"], label


def test_a_served_version_that_was_never_ready_is_found() -> None:
    book = published(1)
    book.version(2, "UPLOADING")
    book.answer("2")
    book.version(2, "ABORTED")
    assert book.rules() == ["not READY"]
    ahead = published(1)
    ahead.end(ahead.begin("ahead", on=True), "ahead")
    ahead.events += [{**event, "t": event["t"] + 100} for event in book.events[3:]]
    assert ahead.rules() == []
    by_default = published(1)
    by_default.fleet(ahead=True)
    by_default.events += [{**event, "t": event["t"] + 100} for event in book.events[3:]]
    assert by_default.rules() == []


@pytest.mark.parametrize("setting", [{"kind": "ROLLING"}, {"bound": 2}, {"on": False}])
def test_a_server_goes_back_from_a_version_that_is_not_ready_when_its_fleet_may_not_serve_it(setting: dict[str, object]) -> None:
    name = {"kind": "strategy", "bound": "skew", "on": "ahead"}[next(iter(setting))]
    for state, expected in (("UPLOADING", []), ("READY", ["served back"])):
        book = published(1)
        book.fleet(ahead=True)
        book.version(2, state)
        book.answer("2")
        book.end(book.begin(name, **setting), name)
        book.answer("1")
        book.version(2, "READY")
        assert book.rules() == expected, state


def test_a_lost_version_is_found() -> None:
    for state in ("ABORTED", "UPLOADING", "ABSENT"):
        book = published(1)
        book.version(1, state)
        assert book.rules() == ["READY lost"], state


def test_a_published_version_that_the_daemon_has_not_as_ready_is_found() -> None:
    book = Book()
    book.version(1, "UPLOADING")
    book.publish(1)
    book.version(1, "ABORTED")
    assert set(book.rules()) == {"READY lost"}


def test_an_operation_that_does_not_end_is_found() -> None:
    book = Book()
    book.begin("rollback", pick=None)
    assert book.rules() == ["stuck"]


def test_an_operation_that_ends_late_is_found() -> None:
    book = Book()
    id = book.begin("sleep", server="")
    book.end(id, "sleep")
    book.events[-1]["t"] += 100
    assert book.rules() == ["stuck"]


def test_an_internal_or_undocumented_reason_is_found() -> None:
    for reason in ("INTERNAL", "OOPS", "HARNESS_KeyError"):
        book = Book()
        book.end(book.begin("gc", keep=1), "gc", reason)
        assert book.rules() == ["INTERNAL"], reason
    book = Book()
    book.end(book.begin("gc", keep=1), "gc", "UNREACHABLE")
    assert book.rules() == []


def test_an_internal_reason_of_one_rank_is_found() -> None:
    book = Book()
    id = book.begin("publish", step=1)
    book.end(id, "publish", version=1, epoch=1, ranks=[{"reason": ""}, {"reason": "INTERNAL"}])
    book.version(1, "READY")
    assert book.rules() == ["INTERNAL"]


def test_a_traceback_in_a_log_is_found() -> None:
    book = Book()
    book.add("log", process="daemon", text="Traceback (most recent call last)")
    assert book.rules() == ["INTERNAL"]


def test_a_reused_number_is_found() -> None:
    book = published(1)
    book.version(1, "READY", step=5)
    assert book.rules() == ["number reused"]
    book = published(1)
    book.publish(1, step=2)
    assert set(book.rules()) == {"number reused", "number order"}


def test_numbers_and_epochs_that_decrease_are_found() -> None:
    assert published(2, 1).rules() == ["number order"]
    book = published(1)
    book.publish(2, epoch=0)
    book.version(2, "READY")
    assert book.rules() == ["number order"]


def test_a_server_that_goes_back_without_an_order_is_found() -> None:
    book = published(1, 2)
    book.answer("2")
    book.answer("1")
    assert book.rules() == ["served back"]


def test_a_server_may_go_back_by_an_order_to_that_version() -> None:
    for order in ("rollback", "target", "pin"):
        book = published(1, 2, 3)
        book.answer("3")
        book.end(book.begin(order, pick=0.5), order, wanted=2)
        book.answer("2")
        assert book.rules() == [], order
        book.answer("1")
        assert book.rules() == ["served back"], order


def test_a_rollback_does_not_excuse_a_return_from_a_later_version() -> None:
    book = published(1, 2)
    book.end(book.begin("rollback", pick=None), "rollback", wanted=1)
    for number in (3, 4, 5):
        book.publish(number)
        book.version(number, "READY")
    book.answer("5")
    book.answer("1")
    assert book.rules() == ["served back"]


def test_an_order_whose_answer_was_lost_may_have_had_effect() -> None:
    book = published(1, 2)
    book.answer("2")
    book.end(book.begin("rollback", pick=None), "rollback", "UNREACHABLE")
    book.answer("1")
    assert book.rules() == []


def test_a_server_may_go_back_from_a_version_that_its_fleet_refused() -> None:
    book = published(1, 2)
    book.answer("2")
    book.add("fleet", refused=[2], strategy="CANARY", move=[2, "FAILED", 1, 2, "CANARY"], before=6.0)
    book.answer("1")
    assert book.rules() == []


def atomic(state: str, id: int = 2) -> dict[str, Any]:
    return {"strategy": "ATOMIC", "refused": [], "move": [id, state, id - 1, id, "ATOMIC"]}


def test_an_old_version_after_the_new_one_of_an_atomic_move_is_found() -> None:
    book = published(1, 2)
    book.add("fleet", **atomic("APPLYING"), before=3.5)
    book.skip(60)
    book.answer("1", server="right")
    book.answer("2", server="left")
    book.add("fleet", **atomic("DONE"), before=6.0)
    assert book.rules() == []
    book.answer("1", server="right")
    assert book.rules() == ["mixed versions"]


def test_an_old_version_after_the_end_of_an_atomic_move_is_not_judged_by_it() -> None:
    book = published(1, 2, 3)
    book.add("fleet", **atomic("DONE"), before=5.0)
    book.skip(60)
    book.answer("2", server="left")
    book.answer("1", server="right")
    book.add("fleet", **atomic("DONE", 3), before=book.now - 2)
    assert book.rules() == []


def test_a_request_that_fails_without_a_fault_is_found() -> None:
    def turned(book: Book, status: int, reason: str) -> None:
        book.add("turned", client="short", server="left", began=book.now - 0.5, status=status, reason=reason)

    book = Book()
    turned(book, 503, "not serving: applying version 2")
    assert book.rules() == []
    turned(book, 500, "engine died")
    turned(book, 503, "overloaded")
    assert book.rules() == ["turned away"] * 2
    book = Book()
    book.add("fault", name="server.kill", target="left", given={})
    turned(book, 0, "ConnectionResetError()")
    book.add("ready", process="left")
    assert book.rules() == []
    turned(book, 0, "ConnectionResetError()")
    assert book.rules() == ["turned away"]


def test_a_process_that_ends_without_a_fault_is_found() -> None:
    book = Book()
    book.add("ready", process="daemon", failpoint="")
    book.add("fault", name="daemon.kill", target="daemon", given={})
    book.add("death", process="daemon", status=-9)
    book.add("ready", process="daemon", failpoint="")
    assert book.rules() == []
    book.add("death", process="daemon", status=1)
    assert book.rules() == ["unexpected death"]


def test_a_daemon_with_an_armed_failpoint_may_end() -> None:
    book = Book()
    book.add("ready", process="daemon", failpoint="commit.sync@1=kill")
    book.add("death", process="daemon", status=-9)
    assert book.rules() == []


def test_what_does_not_arrive_or_is_left_behind_is_found() -> None:
    book = Book()
    book.add("peace", phase="arrived", problems=["servers/left is STAGING"])
    book.add("peace", phase="end", problems=["left in shared memory: resharder-page"])
    assert book.rules() == ["peace, arrived", "peace, end"]
