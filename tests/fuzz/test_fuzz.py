"""A few inputs of each format, always the same, and what was found once; in the night more, of other seeds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from .formats import FORMATS, targets_of
from .harness import Fuzzer, fuzz, watched

CASES = Path(__file__).parent / "cases"
#: What of the job's store is still decoded without a check, so that damage ends in whatever error that leads to.
UNCHECKED = frozenset({"records.frontier", "records.offer", "records.standing"})


@pytest.mark.parametrize("name", FORMATS)
def test_changed_input_is_refused_or_is_what_was_encoded(name: str) -> None:
    wrong = []
    for target in targets_of(name):
        if target.name in UNCHECKED:
            continue
        fuzzer = Fuzzer(target, 1, most=8)
        try:
            with watched():
                for case in sorted((CASES / target.name).glob("*")):
                    failure = fuzzer.try_one(case.read_bytes())
                    wrong += [f"{case}: {failure.text}"] if failure is not None else []
                found = fuzzer.run(inputs=30).failures.values()
                wrong += [f"input {each.number}, {each.data!r:.500}: {each.text}" for each in found]
        finally:
            fuzzer.close()
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FORMATS)
def test_a_minute_of_new_inputs(name: str, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    checked = [target for target in targets_of(name) if target.name not in UNCHECKED]
    reports = fuzz(checked, seed, seconds=60.0, out=tmp_path)
    failures = [
        f"seed {seed}, input {one.number}: {one.data!r}\n{one.text}"
        for each in reports
        for one in each.failures.values()
    ]
    assert not failures, "\n".join(failures)


def test_a_decoder_that_fails_is_noticed() -> None:
    """One of each kind; what the harness does not see is not found."""
    from hypothesis import strategies as st

    from shared_core.errors import CorruptFile

    from .harness import Target, exact

    def decode(data: bytes, _folder: Path) -> bytes:
        if data.startswith(b"hang"):
            while True:
                pass
        if data.startswith(b"much"):
            return bytearray(64 << 20)[:0]
        if data.startswith(b"refuse"):
            raise CorruptFile("no")
        return data[1:] if data.startswith(b"wrong") else data + bytes(1 // (not data.startswith(b"error")) - 1)

    fuzzer = Fuzzer(Target("x", st.just(b"value"), lambda value, _: value, decode, exact), 1, limit_s=0.5)
    try:
        with watched():
            found = {data: fuzzer.try_one(data) for data in (b"value", b"refuse", b"wrong", b"error", b"much", b"hang")}
    finally:
        fuzzer.close()
    assert {data.decode(): one.kind for data, one in found.items() if one is not None} == {
        "wrong": "wrong",
        "error": "error",
        "much": "memory",
        "hang": "hang",
    }
    assert (fuzzer.report.refused, fuzzer.report.decoded) == (1, 3)
