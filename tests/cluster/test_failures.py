"""What follows a failure, without any process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared_core.protocol.failure_policy import BACK_OFF_S, Death, FailureBook, RaisedError, ResponsePlan
from shared_core.protocol.generation import CauseKind, Entry, EntryKind


def death(rank: int = 1, code: int = -9, boundaries: int = 0, error: RaisedError | None = None) -> Death:
    return Death(rank, 100, code, "cause", boundaries, error, "error.json" if error else "", 0.0)


def raised(message: str = "bad", line: int = 3) -> RaisedError:
    return RaisedError(f"ValueError: {message}", f"train.py:{line}")


def respond(book: FailureBook, *deaths: Death) -> ResponsePlan:
    plan = book.respond(deaths)
    book.charge(plan)
    return plan


def test_failures_are_replaced_until_the_budget_is_spent() -> None:
    book = FailureBook(budget=2)
    assert [respond(book, death(rank)).response for rank in (0, 1)] == ["replace", "replace"]
    end = respond(book, death(2))
    assert (end.response, "--max-restarts" in end.reason) == ("end", True)
    assert end.first is not None and end.first.rank == 0


def test_deaths_that_one_restart_answers_count_once() -> None:
    book = FailureBook(budget=1)
    plan = book.respond([death(0), death(1)], everyone=True)
    assert (plan.response, plan.reason) == ("restart", "all workers failed")
    book.charge(plan)
    assert respond(book, death(2)).response == "end"


@pytest.mark.parametrize("budget", [1, 2])
def test_failures_at_one_moment_need_as_many_replacements(budget: int) -> None:
    plan = FailureBook(budget).respond([death(0), death(1)])
    assert plan.response == ("end", "replace")[budget - 1]


def test_what_a_damaged_worker_has_published_is_there_until_a_step_boundary_is_passed() -> None:
    book = FailureBook(budget=9)
    respond(book, replace(death(boundaries=4), kind=CauseKind.DIVERGENT))
    kinds = []
    for boundaries in (4, 5, 5):
        again = book.as_before(death(boundaries=boundaries))
        respond(book, again)
        kinds.append(again.kind.value)
    assert kinds == ["divergent", "died", "died"]
    assert book.as_before(death(rank=2)).kind is CauseKind.DIED


#: What the ledger has written, and what that makes of a plan to replace two of four workers.
WRITTEN = {
    "form": (Entry(incarnations=(1, 1, 0, 0)), "replace", (0.0, 0.0)),
    "continue": (Entry(incarnations=(1, 1, 0, 0), absent=frozenset({0, 1})), "reroute", (3.0, 3.0)),
    "nobody admits": (Entry(incarnations=(1, 1, 2, 2), absent=frozenset(range(4))), "restart", (0.0, 0.0)),
    "drain": (Entry(incarnations=(1, 1, 0, 0), kind=EntryKind.DRAIN, stay=(2, 3)), "shrink", (0.0, 0.0)),
    "nobody drains": (Entry(incarnations=(1, 1, 2, 2), kind=EntryKind.DRAIN), "restart", (0.0, 0.0)),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_entry_of_the_ledger_settles_what_is_done(name: str) -> None:
    entry, response, delays_s = WRITTEN[name]
    book = FailureBook(budget=2)
    plan = book.respond([death(0), death(1)]).as_written(entry, 3.0)
    assert (plan.response, plan.delays_s) == (response, delays_s)
    book.charge(plan)
    assert book.budget == (1 if response == "restart" else 0)


def test_a_row_of_like_deaths_without_progress_ends_the_job() -> None:
    book = FailureBook(budget=100)
    first = death(code=-11, boundaries=5)
    plans = [respond(book, first), *(respond(book, death(code=-11, boundaries=5)) for _ in range(2))]
    assert [plan.response for plan in plans] == ["replace", "replace", "end"]
    assert [plan.delays_s for plan in plans[:2]] == [(delay_s,) for delay_s in BACK_OFF_S[:2]]
    assert plans[-1].first is first


@pytest.mark.parametrize(
    "other", [death(rank=2), death(boundaries=1), death(code=-11)], ids=["rank", "progress", "signal"]
)
def test_a_death_of_another_kind_breaks_the_row(other: Death) -> None:
    book = FailureBook(budget=100)
    deaths = [death(), death(), other, death(boundaries=other.boundaries)]
    assert [respond(book, one).response for one in deaths[:3]] == ["replace"] * 3


def test_the_same_exception_at_the_same_place_twice_is_shown_once() -> None:
    book = FailureBook(budget=100)
    first = death(code=1, error=raised())
    assert respond(book, first).response == "replace"
    end = respond(book, death(code=1, error=raised()))
    assert end.response == "end" and end.first is first and "twice" in end.reason


def test_a_mistake_in_the_program_is_not_tried_again() -> None:
    mistake = RaisedError("ConfigError: no such option\nat all", "train.py:3")
    end = FailureBook(budget=100).respond([death(code=1, error=mistake)])
    assert (end.response, end.first and end.first.error) == ("end", mistake)
    assert end.reason == (
        "rank 1 raised ConfigError: no such option at all (at train.py:3); "
        "a replacement would fail the same way, so the job stops"
    )


def test_exceptions_elsewhere_or_after_progress_are_not_the_same() -> None:
    book = FailureBook(budget=100)
    assert respond(book, death(code=1, error=raised())).response == "replace"
    assert respond(book, death(code=1, error=raised(line=9))).response == "replace"
    assert respond(book, death(code=1, boundaries=4, error=raised())).response == "replace"


def test_exceptions_that_differ_in_words_only_are_a_crash_loop() -> None:
    book = FailureBook(budget=100)
    deaths = [death(code=1, error=raised(f"at {when}")) for when in range(3)]
    assert [respond(book, one).response for one in deaths] == ["replace", "replace", "end"]


def test_place_is_the_innermost_frame_of_the_users_code() -> None:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/train.py", line 12, in <module>\n    main()\n'
        '  File "/home/u/model.py", line 7, in forward\n    return self.linear(x)\n'
        '  File "/env/lib/python3.11/site-packages/torch/nn/linear.py", line 134, in forward\n    ...\n'
        '  File "/home/u/swift-recovery/lightning_swift/strategy.py", line 90, in setup\n    ...\n'
        "RuntimeError: shapes\n"
    )
    data = {"message": {"message": "RuntimeError: shapes", "extraInfo": {"py_callstack": trace}}}
    error = RaisedError.from_error_file(data)
    assert error is not None
    assert (error.kind, error.place) == ("RuntimeError", "/home/u/model.py:7")
    assert RaisedError.from_error_file({"message": "text"}) is None
