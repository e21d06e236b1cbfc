"""The field's words, one each: what this project has called things before is nowhere in its code, messages and help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("shared_core", "lightning_swift", "accelerate_swift", "benchmarks", "examples", "tests")

_WHO = r"(?:workers?|ranks?|machines?|stages?|replicas?|pods?|standbys?|neighbou?rs?|ends?)"
#: A word that is out, as it stands in names and in text, and what is said instead.
OUT = {
    r"newcomers?": "replacement",
    r"predecessors?": "failed worker",
    r"batch[ _-]tops?": "step boundary",
    r"(?:keep|forget|saved|since|newest|publish|read|at)_tops?": "step boundary",
    rf"(?:the|a|any|another|further) loss of (?:a |the |other |another )?{_WHO}": "failure",
    rf"{_WHO} (?:is|are|was|were|be|being|been) lost": "failed",
    rf"lost {_WHO}": "failed",
    r"loss_policy|LossBook|LossCost|LossView|one_loss": "failure",
    rf"(?:let|lets|letting) (?:it|them|replacements?|a replacement|{_WHO}) in": "admit",
    r"let_in|lets_in|letting_in|LET_IN": "admit",
    r"knock(?:s|ed|ing)?": "ask to join",
    r"(?:it|they|who|which|that|job|others|rank|worker|workers|training|run) go(?:es)? on": "continue",
    r"begins? anew": "start from scratch",
    r"prepared standbys?": "hot standby",
    r"Lanes?|LaneBroken|LaneWork": "SurvivorGroup",
    r"Board": "SharedMemoryPublisher",
    r"Knock": "request_join",
    r"News": "RecoveryReporter",
    r"Beginning(?= ?[(:\n]|\b\.)": "StartPoint",
    r"Fronts": "Agreement",
    r"Patience|PATIENCE": "WaitWatchdog, WaitFor, MAX_WAIT_S",
    r"Endings": "FatalActions",
    r"Standing": "WaitStatus",
    r"Strangers?": "NotAuthenticated, UntrackedOptimizers",
    r"Loose": "UnoptimizedParameters",
    r"Following": "IncrementalCopy",
    r"Turn(?= ?[(:])": "ComputeLock",
    r"Telling": "JobReporter",
    r"Hearing": "ControlChannel",
    r"Story": "ConsoleReporter",
    r"Meeting": "RendezvousHandler",
    r"Crew": "MachineMembership",
    r"bury|buries|buried": "handle_worker_exits",
    r"Fleet": "WorkerPool",
    r"hand_on|HAND_ON": "drain_for_resize",
    r"Parting": "ShutdownBarrier",
    r"GuestLayers": "HostedStage",
}
#: Words that mean something else there: file, or its start, and why.
ALLOWED = {
    ("predecessor", "benchmarks/simulate/bamboo"): "the stage before, in the paper that it simulates",
}
_WORDS = "|".join(rf"(?P<_{number}>{word}(?![a-z]))" for number, word in enumerate(OUT))
_PATTERN = re.compile(rf"(?<![A-Za-z])(?:{_WORDS})")


def _texts() -> Iterator[tuple[str, str]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if (
                path.is_file()
                and path.suffix in (".py", ".md", ".txt", ".html", ".toml", ".yaml")
                and path != Path(__file__)
            ):
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def _is_allowed(word: str, file: str) -> bool:
    return any(word.startswith(each) and file.startswith(start) for each, start in ALLOWED)


def test_old_words_are_gone() -> None:
    instead = list(OUT.values())
    found = [
        f"{file}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]!r}, say {instead[int(str(hit.lastgroup)[1:])]!r}"
        for file, text in _texts()
        for hit in _PATTERN.finditer(text)
        if not _is_allowed(hit[0], file)
    ]
    assert not found, "\n".join(found)


def test_old_words_are_found() -> None:
    """The control: each of these would be."""
    for text in (
        "the newcomer",
        "a worker is lost",
        "the loss of a worker",
        "job.batch_top()",
        "class Board:",
        "it goes on",
    ):
        assert _PATTERN.search(text), text
    for text in (
        "the loss of a batch",
        "nothing is lost",
        "val_loss",
        "on top of it",
        "TensorBoardLogger",
        "steps lost",
    ):
        assert not _PATTERN.search(text), text
