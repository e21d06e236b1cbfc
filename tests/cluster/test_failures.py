"""What follows a failure, without any process."""

from __future__ import annotations

import pytest

from shared_core.protocol.failure_policy import BACK_OFF_S, Death, FailureBook, RaisedError


def death(rank: int = 1, code: int = -9, boundaries: int = 0, error: RaisedError | None = None) -> Death:
    return Death(rank, 100, code, "cause", boundaries, error, "error.json" if error else "", 0.0)


def raised(message: str = "bad", line: int = 3) -> RaisedError:
    return RaisedError(f"ValueError: {message}", f"train.py:{line}")


def test_failures_are_replaced_until_the_budget_is_spent() -> None:
    book = FailureBook(budget=2)
    assert [book.judge(death(rank)).action for rank in (0, 1)] == ["replace", "replace"]
    end = book.judge(death(2))
    assert (end.action, "--max-restarts" in end.reason) == ("end", True)
    assert end.first is not None and end.first.rank == 0


def test_deaths_that_one_restart_answers_count_once() -> None:
    book = FailureBook(budget=1)
    assert [book.judge(death(rank), charged=not rank).action for rank in (0, 1)] == ["replace", "replace"]
    assert book.judge(death(2)).action == "end"


def test_a_row_of_like_deaths_without_progress_ends_the_job() -> None:
    book = FailureBook(budget=100)
    first = death(code=-11, boundaries=5)
    verdicts = [book.judge(first), book.judge(death(code=-11, boundaries=5)), book.judge(death(code=-11, boundaries=5))]
    assert [verdict.action for verdict in verdicts] == ["replace", "replace", "end"]
    assert [verdict.delay_s for verdict in verdicts[:2]] == list(BACK_OFF_S[:2])
    assert verdicts[-1].first is first


@pytest.mark.parametrize(
    "other", [death(rank=2), death(boundaries=1), death(code=-11)], ids=["rank", "progress", "signal"]
)
def test_a_death_of_another_kind_breaks_the_row(other: Death) -> None:
    book = FailureBook(budget=100)
    deaths = [death(), death(), other, death(boundaries=other.boundaries)]
    assert [book.judge(one).action for one in deaths[:3]] == ["replace"] * 3


def test_the_same_exception_at_the_same_place_twice_is_shown_once() -> None:
    book = FailureBook(budget=100)
    first = death(code=1, error=raised())
    assert book.judge(first).action == "replace"
    end = book.judge(death(code=1, error=raised()))
    assert end.action == "end" and end.first is first and "twice" in end.reason


def test_a_mistake_in_the_program_is_not_tried_again() -> None:
    mistake = RaisedError("ConfigError: no such option\nat all", "train.py:3")
    end = FailureBook(budget=100).judge(death(code=1, error=mistake))
    assert (end.action, end.first and end.first.error) == ("end", mistake)
    assert end.reason == (
        "rank 1 raised ConfigError: no such option at all (at train.py:3); "
        "a replacement would fail the same way, so the job stops"
    )


def test_exceptions_elsewhere_or_after_progress_are_not_the_same() -> None:
    book = FailureBook(budget=100)
    assert book.judge(death(code=1, error=raised())).action == "replace"
    assert book.judge(death(code=1, error=raised(line=9))).action == "replace"
    assert book.judge(death(code=1, boundaries=4, error=raised())).action == "replace"


def test_exceptions_that_differ_in_words_only_are_a_crash_loop() -> None:
    book = FailureBook(budget=100)
    deaths = [death(code=1, error=raised(f"at {when}")) for when in range(3)]
    assert [book.judge(one).action for one in deaths] == ["replace", "replace", "end"]


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
