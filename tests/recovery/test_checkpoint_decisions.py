"""That all ranks learn in time of a checkpoint, agree on which one they continue from, and end after a last one."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared_core.checkpoint.image import Image
from shared_core.checkpoint.spool import FOLDER, Sealed, Spool
from shared_core.config import SwiftConfig
from shared_core.encoding.plain import dumps
from shared_core.errors import CorruptFile
from shared_core.launcher.persisting import LastCheckpoint
from shared_core.protocol.frontier import StepBoundary
from shared_core.protocol.worker_env import WorkerEnv
from shared_core.protocol.worker_messages import ENDING
from shared_core.transport.store import MemoryStore
from shared_core.worker.checkpoints import recovery_line
from shared_core.worker.checkpoints.checkpoints import named
from shared_core.worker.checkpoints.due import Decisions, FileEntries, StoreEntries
from shared_core.worker.state.replicated import Replicated


@pytest.fixture(params=["file", "store"])
def entries(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Makes the list as another process of the job would."""
    if request.param == "file":
        return lambda: FileEntries(tmp_path / "attempt0" / "due")
    store = MemoryStore()
    return lambda: StoreEntries(lambda: store)


def begun(entries: FileEntries | StoreEntries) -> Decisions:
    decisions = Decisions(entries)
    decisions.joined(0)
    return decisions


def test_all_ranks_find_the_same_step_boundary(entries: Any) -> None:
    first, other = begun(entries()), begun(entries())
    found: list[list[int]] = [[], []]
    for version in range(1, 12):
        if version in (3, 8):
            first.add(version)
        for ranks, decisions in zip(found, (first, other), strict=True):
            if decisions.due(version)[0]:
                ranks.append(version)
    assert found == [[5, 10], [5, 10]]


def test_the_last_one_is_sooner_and_known_as_such(entries: Any) -> None:
    first, other = begun(entries()), begun(entries())
    first.add(6)
    first.add(6, last=True)
    assert [other.due(version) for version in (6, 7, 8)] == [(False, False), (True, True), (True, False)]


def test_another_rank_may_say_that_it_is_the_last(entries: Any) -> None:
    """At the step boundary at which rank 0 decides, too: neither takes the other's place in the list."""
    first, other = begun(entries()), begun(entries())
    first.add(3)
    other.add(3, last=True)
    first.add(3, last=True)
    assert [first.due(version) for version in (3, 4, 5)] == [(False, False), (True, True), (True, False)]
    assert [other.due(version) for version in (3, 4, 5)] == [(False, False), (True, True), (True, False)]


def test_a_replacement_finds_those_due_again_that_it_passes(entries: Any) -> None:
    first = begun(entries())
    for version in (2, 6, 9):
        first.add(version)
    replacement = Decisions(entries())
    replacement.joined(4)  # at the step boundary of the first of them
    assert [version for version in range(5, 14) if replacement.due(version)[0]] == [8, 11]
    assert replacement.pending == 11


# -- what all ranks continue from -------------------------------------------------------------------------------------


def environment(folder: Path, rank: int, world_size: int) -> WorkerEnv:
    config = SwiftConfig.from_dict({"detection.wait_timeout_s": 20.0})
    return WorkerEnv(rank, world_size, 0, 0, 1, folder, "", None, config)


def snapshot(folder: Path, attempt: int, step: int, rank: int, value: float, world_size: int = 2) -> None:
    """A sealed snapshot of a rank whose only parameter is ``value``."""
    spool = Spool(folder / FOLDER, attempt)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    replicated = Replicated([model], [])
    boundary = StepBoundary(
        index=step, version=step, entry=0, kind="batch", groups={}, received={}, sent={}, members={}
    )
    boundary = replace(boundary, replicas=[])
    local = {"boundary": asdict(boundary), "parts": {"rank": rank}, "ends": {}, "records": []}
    (spool.folder_of(step) / f"rank{rank}").write_bytes(dumps(local))
    files = [f"rank{rank}"]
    if rank == 0:
        description, tensors = replicated.export()
        values, metadata = named(replicated, description, tensors)
        image = Image(spool.folder_of(step) / "replicated0.safetensors", values, metadata)
        image.seal()
        files.append("replicated0.safetensors")
    spool.seal(Sealed(step, rank, world_size, (0, 1), tuple(files), {"session": f"s{attempt}", "run": "r"}))


def agree(folder: Path, world_size: int = 2) -> list[recovery_line.Restored | None | BaseException]:
    """What each rank continues from."""
    store, found = MemoryStore(), [None] * world_size  # type: list[Any], list[Any]

    def rank(number: int) -> None:
        mine = recovery_line.in_memory(Spool(folder / FOLDER, 9), number, world_size)
        try:
            found[number] = recovery_line.agree(environment(folder, number, world_size), store, mine)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return found


def steps(found: list[Any]) -> list[int | None]:
    return [each.boundary.index if isinstance(each, recovery_line.Restored) else each for each in found]


def test_the_newest_that_all_ranks_have(tmp_path: Path) -> None:
    for step in (4, 8):
        for rank in range(2):
            snapshot(tmp_path, 0, step, rank, float(step))
    snapshot(tmp_path, 0, 12, 0, 12.0)  # rank 1 failed before it had copied its part
    found = agree(tmp_path)
    assert steps(found) == [8, 8]
    for rank, each in enumerate(found):
        assert isinstance(each, recovery_line.Restored)
        assert each.tensors[0].item() == 8.0 and each.parts == {"rank": rank}


def test_parts_of_two_attempts_are_never_mixed(tmp_path: Path) -> None:
    for rank in range(2):
        snapshot(tmp_path, 0, 4, rank, 1.0)
    snapshot(tmp_path, 1, 8, 0, 2.0)
    snapshot(tmp_path, 2, 8, 1, 3.0)
    assert steps(agree(tmp_path)) == [4, 4]


@pytest.mark.parametrize("name", ["rank1", "replicated0.safetensors"])
def test_one_that_a_rank_cannot_read_is_passed_over_by_all(tmp_path: Path, name: str) -> None:
    for step in (4, 8):
        for rank in range(2):
            snapshot(tmp_path, 0, step, rank, float(step))
    path = Spool(tmp_path / FOLDER, 0).folder_of(8) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert steps(agree(tmp_path)) == [4, 4]


def test_a_replacement_begins_with_what_the_others_have_begun_with(tmp_path: Path) -> None:
    store = MemoryStore()
    for rank in range(1):
        snapshot(tmp_path, 0, 4, rank, 1.0, world_size=1)
    env = environment(tmp_path, 0, 1)
    first = recovery_line.agree(env, store, recovery_line.in_memory(Spool(tmp_path / FOLDER, 9), 0, 1))
    snapshot(tmp_path, 1, 9, 0, 2.0, world_size=1)  # newer, but the others have begun with the older
    later = recovery_line.agree(env, store, recovery_line.in_memory(Spool(tmp_path / FOLDER, 9), 0, 1))
    assert steps([first, later]) == [4, 4]
    with pytest.raises(CorruptFile, match="from which this attempt began is gone"):
        recovery_line.agree(env, store, [])


# -- the last one -----------------------------------------------------------------------------------------------------


def last(tmp_path: Path, grace_s: float = 10.0, wanted: bool = True) -> tuple[LastCheckpoint, list[str]]:
    keys: list[str] = []
    return LastCheckpoint(wanted, grace_s, 100.0, tmp_path, keys.append), keys


def test_the_end_waits_until_it_is_committed(tmp_path: Path) -> None:
    end, keys = last(tmp_path)
    assert end.waits([signal.SIGTERM]) and (tmp_path / ENDING).exists() and keys == [ENDING]
    assert end.waits([signal.SIGTERM])
    end.saved({"boundary": 7, "done": True})
    assert not end.waits([signal.SIGTERM]) and end.left_s == 0.0 < end.writer_s


def test_the_end_waits_no_longer_than_the_grace(tmp_path: Path) -> None:
    end, _ = last(tmp_path, grace_s=0.0)
    assert not end.waits([signal.SIGTERM])


@pytest.mark.parametrize("others", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGUSR1, signal.SIGINT]])
def test_a_second_signal_ends_at_once(tmp_path: Path, others: list[int]) -> None:
    end, _ = last(tmp_path)
    assert end.waits([signal.SIGTERM])
    assert not end.waits([signal.SIGTERM, *others])
