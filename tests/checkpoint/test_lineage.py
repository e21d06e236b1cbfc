"""Runs of different commands in one folder: none touches another's, and each start continues with its own."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_tools import run_writer, snapshot

from shared_core.checkpoint import lineage
from shared_core.checkpoint.command import Command
from shared_core.checkpoint.lineage import Contents, candidates, contents, folder_of, next_start, to_adopt
from shared_core.checkpoint.spool import Spool
from shared_core.checkpoint.verdict import sentence, verdict

ROOT = Path(__file__).parents[2]
A, B = (Command.of("/home/me/train.py", ["--lr", rate], "script") for rate in ("0.1", "0.2"))
EARLY, LATE = "20260101T000000-00000a", "20260102T000000-00000b"


@pytest.fixture
def where(in_memory: Path) -> Path:
    return in_memory / "storage"


def of(command: Command, run: str, **more: Any) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    return {"command": command.key, "words": command.words, "run": run, **more}


def save(where: Path, command: Command, run: str, *steps: int, ended: bool = False, **more: Any) -> None:
    """Checkpoints of a run, as its writer makes them."""
    folder = folder_of(str(where), command, run)
    spool = Spool(where.parent / f"spool-{command.key}-{run}")
    for step in steps:
        snapshot(spool, step, folder, **of(command, run, **more))
        assert run_writer(spool) == (0, [])
    if ended:
        lineage.mark_ended(folder, max(steps))


def digests(folder: str) -> dict[str, str]:
    """Of all files of a run."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def next_of(where: Path, command: Command) -> int | None:
    """The step from which the next start of a command continues."""
    saved = next_start(contents(where), command).saved
    return saved.step if saved is not None else None


SAME = {
    "workers": (["--devices", "2"], ["--devices", "4"]),
    "workers, named with an equals sign": (["--nproc_per_node=2"], []),
    "adopted": (["--resume-from", "x/step-0000000040"], []),
    "adopted, named with an equals sign": (["--resume_from=x"], ["--resume_from=y"]),
}
OTHER = {
    "a value": (["--lr", "0.1"], ["--lr", "0.2"]),
    "order": (["--a", "1", "--b", "2"], ["--b", "2", "--a", "1"]),
    "devices that are no number": (["--devices", "left"], ["--devices", "right"]),
    "what follows a flag of ours": (["--resume-from", "--fast"], ["--resume-from"]),
    "loader workers": (["--num-workers", "2"], ["--num-workers", "4"]),
}


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_what_is_the_same_command(name: str) -> None:
    first, second = (Command.of("/home/me/train.py", args, "script") for args in (SAME | OTHER)[name])
    assert (first.key == second.key) == (name in SAME)


def test_the_key_of_a_command_stays_the_same() -> None:
    words = ["script", "/home/me/train.py", "--lr", "0.1"]
    assert A.key == hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
    assert A.short == "train.py --lr 0.1" and Command.from_json(A.to_json()) == A


def test_the_same_steps_of_another_command_stay_as_they_are(where: Path) -> None:
    """Neither overwritten nor pruned nor counted, and neither continued."""
    save(where, A, EARLY, 10, 20)
    before = digests(folder_of(str(where), A, EARLY))
    save(where, B, LATE, 10, 15, 20, 25)
    assert digests(folder_of(str(where), A, EARLY)) == before
    assert [each.step for each in candidates(contents(where), B.key)] == [25, 20]
    assert (next_of(where, A), next_of(where, B)) == (20, 25)


RUNS = {
    "one": ([EARLY], [], [EARLY]),
    "it has ended": ([EARLY], [EARLY], []),
    "a later one has ended": ([EARLY, LATE], [LATE], []),
    "an earlier one has ended": ([EARLY, LATE], [EARLY], [LATE]),
}


@pytest.mark.parametrize("name", RUNS)
def test_which_runs_the_next_start_may_continue_with(name: str) -> None:
    runs, ended, wanted = RUNS[name]
    assert [run for run in runs if Contents(ended={"x": frozenset(ended)}).continues(run, "x")] == wanted


def test_what_ended_runs_of_the_same_command_have_left_goes_once_there_are_two_others(where: Path) -> None:
    save(where, A, EARLY, 10, 20, ended=True)
    save(where, B, EARLY, 10, ended=True)
    save(where, A, LATE, 5)
    assert len(contents(where, A.key).saved) == 3
    save(where, A, LATE, 6)
    assert [(each.run, each.step) for each in contents(where, A.key).saved] == [(LATE, 5), (LATE, 6)]
    assert len(contents(where, B.key).saved) == 1


def test_what_can_be_adopted(where: Path) -> None:
    save(where, A, EARLY, 10, 20, ended=True)
    save(where, B, LATE, 5)
    folder = folder_of(str(where), A, EARLY)
    assert [each.step for each in to_adopt(str(where))[0]] == [5, 20, 10], "by the time of the commit"
    assert [each.step for each in to_adopt(folder)[0]] == [20, 10]
    assert [each.step for each in to_adopt(f"file://{folder}/step-0000000010")[0]] == [10]
    assert to_adopt(f"{folder}/step-0000000011")[0] == [] and to_adopt(f"{where}/nothing")[0] == []
    os.truncate(f"{folder}/step-0000000020/rank1", 5)
    said: list[str] = []
    found = lineage.first_whole(to_adopt(folder)[0], said.append)
    assert found is not None and found.step == 10 and len(said) == 1


# -- what is said at the end ------------------------------------------------------------------------------------------

VERDICTS = {
    "committed": ((41, 41), {}, "the last checkpoint is committed, at step boundary 41: nothing is lost; NEXT"),
    "not in time": ((57, 40), {}, "the last checkpoint, at step boundary 57, was not written in time; NEXT"),
    "never one": ((3, -1), {}, "the last checkpoint, at step boundary 3, was not written in time; NEXT"),
    "nothing begun": ((0, 40), {}, "nothing had to be written: no batch was begun since the start; NEXT"),
    "ended": ((60, 55), {"ended": True}, "nothing had to be written: the run has ended; NEXT"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_one_sentence_for_each_end(name: str) -> None:
    (reached, committed), more, wanted = VERDICTS[name]
    assert sentence(reached, committed, "NEXT", **more) == wanted


def test_another_run_s_checkpoint_is_not_the_last_one(where: Path, spool: Spool) -> None:
    """A run before had got further, and this one was told to start from scratch."""
    save(where, A, EARLY, 100)
    snapshot(spool, 7, folder_of(str(where), A, LATE), **of(A, LATE))
    said = verdict(str(where), A, spool, 7, continues=False)
    assert "step boundary 7, was not written in time" in said and said.endswith("continues from step 100")
    assert run_writer(spool) == (0, [])
    said = verdict(str(where), A, spool, 7, continues=False)
    assert "committed, at step boundary 7: nothing is lost" in said and said.endswith("continues from step 7")


def test_storage_that_does_not_answer_is_not_waited_for(where: Path, spool: Spool) -> None:
    snapshot(spool, 7, folder_of(str(where), A, LATE), **of(A, LATE))
    assert run_writer(spool) == (0, [])
    said = verdict("nonsense://x", A, spool, 7, continues=False)
    assert "nothing is lost" in said and "swiftctl checkpoints nonsense://x" in said


# -- clocks, and what cannot be used ----------------------------------------------------------------------------------


def test_a_new_run_is_later_than_all_that_are_there_whatever_the_clock_says(where: Path) -> None:
    """One machine's clock was ahead; of the runs after it the next start continues with the newest."""
    ahead = "20991231T235959-00000c"
    save(where, A, EARLY, 100)
    save(where, A, ahead, 5, ended=True)
    assert next_of(where, A) is None, "it noted that it came after the other"
    later = lineage.next_run(str(where), A)
    assert lineage.age_key(later) > ahead
    save(where, A, later, 7)
    assert next_of(where, A) == 7
    last = lineage.next_run(str(where), A)
    assert lineage.age_key(last) > later and lineage.age_key(lineage.next_run(str(where), B)) < ahead
    lineage.mark_ended(folder_of(str(where), A, later), 7)
    assert next_of(where, A) is None
    assert lineage.age_key(lineage.new_run(["99999999T999999-00000f"]))


def test_what_cannot_be_read_is_passed_over_and_named(where: Path) -> None:
    save(where, A, EARLY, 10, 20)
    os.truncate(f"{folder_of(str(where), A, EARLY)}/step-0000000020/manifest.json", 0)
    found = contents(where, A.key)
    (bad,) = found.unusable(A.key)
    assert [each.step for each in candidates(found, A.key)] == [10]
    assert str(bad).startswith(f"checkpoint {folder_of(str(where), A, EARLY)}/step-0000000020 is passed over: the mani")
    said: list[str] = []
    lineage.tell_passed([bad], candidates(found, A.key)[0], said.append)
    assert said == [str(bad)]
    os.truncate(f"{folder_of(str(where), A, EARLY)}/step-0000000010/manifest.json", 0)
    following = str(next_start(contents(where, A.key), A))
    assert "ends with an error: none of its checkpoints is whole; with checkpoint.resume='never'" in following
    lineage.mark_ended(folder_of(str(where), A, EARLY), 20)
    assert not contents(where, A.key).unusable(A.key), "the next start would not have looked at it"
