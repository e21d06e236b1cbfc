"""Gives a decoder changed values and checks what comes out: errors of ours, the value itself, little memory, in time.

A *target* is one decoder with the values that it is made for. Its inputs are numbered; a seed and a number make the
same input again, and every input that fails is written into a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st

from shared_core.errors import SwiftError

from .fingerprint import fingerprint
from .mutate import mutated

#: What a decoder may raise.
REFUSALS = (SwiftError, OSError)
#: Most memory that an input may take: so many bytes, and so many for each byte of it.
SPARE_BYTES, BYTES_A_BYTE = 16 << 20, 256
#: Most address space beyond what the process has when it begins, for what Python does not count (tensors).
ADDRESS_BYTES = 3 << 30
#: Longest time of an input, and of one that does not come back to Python, in seconds.
LIMIT_S, HARD_LIMIT_S = 5.0, 60.0
#: Ratios are counted from so many bytes of input on, and memory from so many: error messages cost as much.
_LEAST_INPUT, _SHRINK_S = 1024, 3.0
#: Memory is counted for one of so many inputs.
_COUNTED = 4


class Wrong(Exception):
    """A changed input was decoded to something else than what was encoded."""


class Hang(BaseException):
    """An input took longer than :data:`LIMIT_S`."""


class TooMuch(Exception):
    """An input took more memory than it may."""


@dataclass(frozen=True)
class Corpus:
    """Encoded values of a target.

    Attributes:
        encoded: each value.
        known: fingerprints of what they are decoded to; of the parts where a decoder gives a list of parts.
    """

    encoded: tuple[bytes, ...]
    known: frozenset[str]


#: Says what is wrong with the value that an input was decoded to; empty if nothing is.
Rule = Callable[[Any, bytes, Corpus], str]


@dataclass(frozen=True)
class Target:
    """One decoder.

    Attributes:
        name: unique; it begins with the name of its format.
        values: what is encoded.
        encode: gives the bytes of a value; may use the folder, which is empty but for what was put there before.
        decode: reads bytes, and uses what it has read as the product does.
        rule: what a decoded value must be.
        seal: makes the checksums right that a change has broken, so that changed values get through to what is behind
            them; what is changed is what it is given.
        count: how many values are encoded.
        whole: one of so many inputs is left as it was encoded.
        refusable: what is encoded may be refused, too.
    """

    name: str
    values: st.SearchStrategy[Any]
    encode: Callable[[Any, Path], bytes]
    decode: Callable[[bytes, Path], Any]
    rule: Rule
    seal: Callable[[bytes], bytes] = bytes
    count: int = 25
    whole: int = 50
    refusable: bool = False

    def read(self, data: bytes, folder: Path) -> Any:
        """The value of an input."""
        return self.decode(self.seal(data), folder)


def only_errors(_value: Any, _data: bytes, _corpus: Corpus) -> str:
    """For decoders of what nothing protects: any value will do."""
    return ""


def exact(value: Any, _data: bytes, corpus: Corpus) -> str:
    """For formats with a checksum: the value is one of those that were encoded."""
    return "" if fingerprint(value) in corpus.known else f"decoded to {value!r:.300}, which was never encoded"


def exact_parts(value: Any, _data: bytes, corpus: Corpus) -> str:
    """The same of every part of a list; parts may be missing, as a torn end is."""
    strange = [part for part in value if fingerprint(part) not in corpus.known]
    return f"decoded to {strange[0]!r:.300} among others, which was never encoded" if strange else ""


def stable(encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> Rule:
    """For formats without a checksum: what was decoded can be encoded, and is the same when it is decoded again."""

    def rule(value: Any, _data: bytes, _corpus: Corpus) -> str:
        again = decode(encode(value))
        return "" if fingerprint(again) == fingerprint(value) else f"{value!r:.300} comes back as {again!r:.300}"

    return rule


@dataclass
class Failure:
    """An input for which a property does not hold.

    Attributes:
        kind: ``error``, ``wrong``, ``memory`` or ``hang``.
        place: exception and where in the product it came from; failures of one place count as one.
        number: of the input.
        data: the input.
        text: for people.
    """

    kind: str
    place: str
    number: int
    data: bytes
    text: str


@dataclass
class Report:
    """What became of the inputs of a target.

    Attributes:
        target: its name.
        seed: that all was drawn from.
        inputs: how many.
        refused: by an error of ours.
        decoded: to a value.
        ratio: most bytes of memory for a byte of input; inputs of less than 1 KiB count as 1 KiB.
        slowest_s: longest time of an input.
        failures: by place.
    """

    target: str
    seed: int
    inputs: int = 0
    refused: int = 0
    decoded: int = 0
    ratio: float = 0.0
    slowest_s: float = 0.0
    failures: dict[str, Failure] = field(default_factory=dict)

    def __str__(self) -> str:
        return (
            f"{self.target:<28} inputs {self.inputs:>8}  refused {self.refused:>8}  decoded {self.decoded:>7}  "
            f"memory {self.ratio:>7.1f} x  slowest {self.slowest_s:6.3f} s  failures {len(self.failures)}  "
            f"seed {self.seed}"
        )


def examples(values: st.SearchStrategy[Any], seed: int, count: int) -> list[Any]:
    """Values drawn from a strategy; the same for the same seed."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(values)
    def collect(value: Any) -> None:
        found.append(value)

    collect()
    return found


class Fuzzer:
    """Runs one target.

    Args:
        target: which one.
        seed: that all is drawn from.
        out: where failing inputs are written; None writes none.
        limit_s: longest time of an input.
        most: values that are encoded, at most.
    """

    def __init__(
        self, target: Target, seed: int, out: Path | None = None, limit_s: float = LIMIT_S, most: int = 1000
    ) -> None:
        count = min(target.count, most)
        self.target, self.out, self._limit_s = target, out, limit_s
        self.report = Report(target.name, seed)
        self._folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        with quiet():
            encoded = [target.encode(value, self._folder) for value in examples(target.values, seed, count)]
            decoded = []
            for data in encoded:
                with contextlib.suppress(*(REFUSALS if target.rule is not only_errors else (Exception,))):
                    decoded.append(target.read(data, self._folder))
        if not (target.refusable or target.rule is only_errors) and len(decoded) < len(encoded):
            raise AssertionError(f"{target.name}: what was encoded is refused")
        parts = [part for value in decoded for part in (value if target.rule is exact_parts else [value])]
        checked = target.rule in (exact, exact_parts)
        self.corpus = Corpus(tuple(encoded), frozenset(map(fingerprint, parts)) if checked else frozenset())

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def input(self, number: int) -> bytes:
        """The input of a number."""
        chance = random.Random(f"{self.report.seed} {self.target.name} {number}")
        data = chance.choice(self.corpus.encoded)
        return data if number % self.target.whole == 0 else mutated(data, self.corpus.encoded, chance)

    def run(self, *, until: float = float("inf"), inputs: int | None = None) -> Report:
        """Continue with the next inputs.

        Args:
            until: ``time.monotonic()`` at which to end.
            inputs: how many; None for any number.
        """
        begun = self.report.inputs
        while time.monotonic() < until and (inputs is None or self.report.inputs - begun < inputs):
            number = self.report.inputs
            data = self.input(number)
            self.report.inputs += 1
            failure = self.try_one(data, number)
            if failure is not None and failure.place not in self.report.failures:
                self.report.failures[failure.place] = self._noted(failure)
        return self.report

    def try_one(self, data: bytes, number: int = -1) -> Failure | None:
        """Read an input; what is wrong then, None if nothing is."""
        report, started = self.report, time.perf_counter()
        value: Any = None
        caught: BaseException | None = None
        kind, peak_of = "", [0]
        try:
            # Counting takes longer than decoding: most inputs go without, below the limit of the address space.
            with limited_time(self._limit_s), quiet(), counted_memory(number % _COUNTED == 0 or number < 0) as peak_of:
                value = self.target.read(data, self._folder)
                report.decoded += 1
        except REFUSALS:
            report.refused += 1
        except Hang as error:
            kind, caught = "hang", error
        except Exception as error:
            kind, caught = "error", error
        peak = peak_of[0]
        report.slowest_s = max(report.slowest_s, time.perf_counter() - started)
        report.ratio = max(report.ratio, peak / max(len(data), _LEAST_INPUT))
        if caught is None and peak > SPARE_BYTES + BYTES_A_BYTE * len(data):
            kind, caught = "memory", TooMuch(f"{peak} bytes for {len(data)} bytes of input")
        if caught is None and value is not None:
            try:
                with limited_time(self._limit_s), quiet():
                    wrong = self.target.rule(value, data, self.corpus)
                if wrong:
                    kind, caught = "wrong", Wrong(wrong)
            except Exception as error:
                kind, caught = "wrong", error
        if caught is None:
            return None
        return Failure(kind, f"{kind}: {type(caught).__name__} {_place_of(caught)}", number, data, _text_of(caught))

    def _noted(self, failure: Failure) -> Failure:
        """With the smallest input that fails alike, written into files."""
        failure = self._shrunk(failure)
        if self.out is not None:
            folder = self.out / self.target.name
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{failure.kind}-{hashlib.sha256(failure.place.encode()).hexdigest()[:8]}"
            (folder / f"{name}.input").write_bytes(failure.data)
            (folder / f"{name}.txt").write_text(
                f"{failure.place}\nseed {self.report.seed}, input {failure.number}\nagain: python -m tests.fuzz "
                f"--input {folder / name}.input {self.target.name}\n\n{failure.text}",
                errors="backslashreplace",
            )
            print(f"{self.target.name}: {failure.place}; seed {self.report.seed}, input {failure.number}", flush=True)
        return failure

    def _shrunk(self, failure: Failure) -> Failure:
        deadline = time.monotonic() + (_SHRINK_S if failure.kind != "hang" else 0.0)
        kept = self.report
        self.report = Report(kept.target, kept.seed)
        size = len(failure.data) // 2
        while size and time.monotonic() < deadline:
            at = 0
            while at < len(failure.data) and time.monotonic() < deadline:
                smaller = self.try_one(failure.data[:at] + failure.data[at + size :], number=0)
                if smaller is not None and smaller.place == failure.place:
                    failure = dataclasses.replace(smaller, number=failure.number)
                else:
                    at += size
            size //= 2
        self.report = kept
        return failure


def fuzz(
    targets: Sequence[Target],
    seed: int,
    *,
    seconds: float | None = None,
    inputs: int | None = None,
    out: Path | None = None,
) -> list[Report]:
    """Run targets in turns.

    Args:
        targets: which.
        seed: that all is drawn from.
        seconds: for all of them together.
        inputs: for each of them.
        out: where failing inputs are written.
    """
    fuzzers = [Fuzzer(target, seed, out) for target in targets]
    try:
        with watched():
            if inputs is not None:
                return [each.run(inputs=inputs) for each in fuzzers]
            end = time.monotonic() + (seconds or 0.0)
            turn = max(0.2, min(10.0, (seconds or 0.0) / len(fuzzers) / 3))
            while time.monotonic() < end:
                for each in fuzzers:
                    each.run(until=min(end, time.monotonic() + turn))
            return [each.report for each in fuzzers]
    finally:
        for each in fuzzers:
            each.close()


# -- limits ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Memory is bounded in here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def counted_memory(wanted: bool) -> Iterator[list[int]]:
    """Gives a list whose only element is, afterwards, the most bytes that Python took in here; 0 if not ``wanted``."""
    peak = [0]
    if not wanted:
        yield peak
        return
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak[0] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@contextlib.contextmanager
def limited_time(limit_s: float) -> Iterator[None]:
    """Raises Hang in here after a while."""

    def ring(_number: int, _frame: object) -> None:
        raise Hang(f"no end after {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class _Nowhere(io.TextIOBase):
    """Takes what the product says about each damaged input."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What is printed in here is not; an exception that ends a thread is raised here."""
    ended: list[BaseException] = []
    hook = threading.excepthook
    threading.excepthook = lambda args: ended.append(args.exc_value) if args.exc_value is not None else None
    nowhere = _Nowhere()
    try:
        with contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        threading.excepthook = hook
    if ended:
        raise ended[0]


def _place_of(error: BaseException) -> str:
    """The innermost line of the product, else of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames if any(f"/{name}/" in one.filename for name in _PRODUCT)] or frames
    if not ours:
        return ""
    return f"{'/'.join(Path(ours[-1].filename).parts[-2:])}:{ours[-1].lineno}"


_PRODUCT = ("shared_core", "lightning_swift", "accelerate_swift")


def _text_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    return text if len(text) < 8000 else f"{text[:4000]}\n...\n{text[-4000:]}"
