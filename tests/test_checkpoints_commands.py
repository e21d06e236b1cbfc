"""Commands that differ in one argument share a folder of checkpoints: each continues with its own, and says what it
does.

What ``swiftctl checkpoints`` prints last is compared with what the next start does each time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpointed import continued_from, finished, options, running, saved
from harness import SCRIPTS, Jobs

from shared_core.cli.swiftctl import main
from tests.support.runner import JobResult, compare

pytestmark = pytest.mark.timeout(300)

SCRIPT = "plain_ddp.py"
A, B, C = (["--norm", "--steps", steps] for steps in ("240", "241", "242"))
RESTART = ["--on-failure=restart"]
EVERY = 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def stopped(jobs: Jobs, folder: Path, args: Sequence[str], boundaries: int, *launcher: str) -> tuple[JobResult, int]:
    """Kill all of a job once it has passed so many step boundaries, and has made two checkpoints; its newest one."""
    words, begun = " ".join([SCRIPT, *args]), time.time()

    def made() -> list[int]:
        return [each.step for each in saved(folder) if each.command.words == words and each.time > begun]

    with running(jobs, SCRIPT, args, env=options(folder, EVERY), launcher_args=[*RESTART, *launcher]) as job:
        job.until(lambda: job.boundaries() >= boundaries and len(made()) > 1)
        job.kill()
        result = job.end()
    return result, made()[-1]


def to_its_end(jobs: Jobs, folder: Path, args: Sequence[str], *launcher: str) -> JobResult:
    """Let a job end well; its result is the one of a run without interruption."""
    env = options(folder, EVERY)
    with running(jobs, SCRIPT, args, env=env, launcher_args=[*RESTART, *launcher]) as job:
        result = finished(job)
    compare(result, jobs.reference(SCRIPT, args=args))
    return result


def following(folder: Path, args: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What ``swiftctl checkpoints`` says last of a command."""
    main(["checkpoints", str(folder), "--for", str(SCRIPTS / SCRIPT), *args])
    last: str = capsys.readouterr().out.splitlines()[-1]
    return last


def continues(args: Sequence[str], step: int) -> str:
    return f"the next start of '{' '.join([SCRIPT, *args])}' continues from step {step}"


def said(result: JobResult) -> list[str]:
    """Why it starts from scratch, as it says itself."""
    lines = [line.removeprefix("[swift] ") for line in result.stderr.splitlines()]
    return [line for line in lines if "starts from scratch" in line]


def digests(folder: Path) -> dict[str, str]:
    """Of all files of the runs that are there."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.nightly
def test_a_changed_argument_leaves_the_first_command_s_checkpoints_alone(
    jobs: Jobs, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, newest = stopped(jobs, folder, A, 20)
    assert following(folder, A, capsys) == continues(A, newest)
    before, predicted = digests(folder), following(folder, B, capsys)
    assert predicted == (
        f"{folder} holds step {newest} of another command ({SCRIPT} --norm --steps 240); this run starts from scratch; "
        "--resume-from adopts it"
    )
    other, others = stopped(jobs, folder, B, newest + 10)  # over the same steps, and past them
    assert said(other) == [predicted] and not continued_from(other)
    assert before.items() <= digests(folder).items(), "the second command has changed a file of the first"
    assert following(folder, B, capsys) == continues(B, others)
    assert continued_from(to_its_end(jobs, folder, A)) == {newest}
    assert "starts from scratch: its last run has ended" in following(folder, A, capsys)
    assert following(folder, B, capsys) == continues(B, others)


@pytest.mark.nightly
def test_both_continue_with_their_own_and_start_from_scratch_once_they_have_ended(
    jobs: Jobs, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, first = stopped(jobs, folder, A, 40)
    _, second = stopped(jobs, folder, B, 20)
    assert continued_from(to_its_end(jobs, folder, B)) == {second}
    assert continued_from(to_its_end(jobs, folder, A)) == {first}
    for args in (A, B):
        assert "starts from scratch: its last run has ended" in following(folder, args, capsys)
        result, newest = stopped(jobs, folder, args, 20)
        assert (
            not continued_from(result)
            and "of this command, which has ended; this run starts from scratch" in said(result)[0]
        )
        assert following(folder, args, capsys) == continues(args, newest)


@pytest.mark.nightly
def test_resume_from_adopts(jobs: Jobs, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result is that of the run that made the checkpoint, in its length; started again it
    continues with its own.
    """
    _, newest = stopped(jobs, folder, A, 20)
    path = saved(folder)[-1].path
    told = f"--resume-from={path.parent}"
    adopted, own = stopped(jobs, folder, B, newest + 20, told)
    assert continued_from(adopted) == {newest} and not said(adopted)
    assert adopted.stderr.count(f"begins with step {newest} at {path}, of '{SCRIPT} --norm --steps 240'") == 1
    assert own > newest and following(folder, B, capsys) == continues(B, own)
    assert continued_from(to_its_end(jobs, folder, B, told)) == {own}
    assert following(folder, A, capsys) == continues(A, newest)
