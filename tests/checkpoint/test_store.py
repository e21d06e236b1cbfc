"""Checkpoints are complete or absent: kills, damage and full devices, with real files and processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_tools import newest, write_part

from shared_core.checkpoint import store
from shared_core.checkpoint.store import Checkpoint, commit, committed, prune, read_part, survey
from shared_core.errors import CorruptFile

WORLD = 2


def save(root: Path, step: int, size: int = 1000) -> Checkpoint:
    """A checkpoint of ``WORLD`` parts whose bytes depend on step and rank."""
    parts = {}
    for rank in range(WORLD):
        parts[f"rank{rank}.bin"] = write_part(root, step, f"rank{rank}.bin", bytes([step % 256, rank]) * size)
    return commit(root, step, parts, {"world_size": WORLD, "epoch": 3})


def temporaries(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if ".tmp-" in path.name]


def test_round_trip(tmp_path: Path) -> None:
    written = save(tmp_path, 5)
    found = newest(tmp_path)
    assert found == written
    assert found.step == 5 and found.meta == {"world_size": WORLD, "epoch": 3}
    assert read_part(found, "rank1.bin") == bytes([5, 1]) * 1000
    assert found.parts["rank1.bin"] == hashlib.sha256(bytes([5, 1]) * 1000).hexdigest()
    assert temporaries(tmp_path) == []


def test_the_newest_by_step_is_taken_not_the_last_written(tmp_path: Path) -> None:
    save(tmp_path, 100)
    save(tmp_path, 20)
    found = newest(tmp_path)
    assert found is not None and found.step == 100


def truncate(root: Path) -> None:
    path = root / "step-0000000020" / "rank1.bin"
    os.truncate(path, path.stat().st_size - 1)


def flip_part(root: Path) -> None:
    flip(root / "step-0000000020" / "rank0.bin", 777)


def flip_manifest_meta(root: Path) -> None:
    path = root / "step-0000000020" / "manifest.json"
    at = path.read_bytes().index(b"epoch") + 9
    assert path.read_bytes()[at : at + 1] == b"3"
    flip(path, at)


def no_manifest(root: Path) -> None:
    (root / "step-0000000020" / "manifest.json").unlink()


def no_part(root: Path) -> None:
    (root / "step-0000000020" / "rank1.bin").unlink()


def renamed(root: Path) -> None:
    (root / "step-0000000020").rename(root / "step-0000000021")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_part, flip_manifest_meta, no_manifest, no_part, renamed],
)
def test_a_damaged_checkpoint_is_passed_over(damage: Callable[[Path], None], tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    damage(tmp_path)
    found = newest(tmp_path)
    assert found is not None and found.step == 10
    (other,) = [one for one in survey(tmp_path) if one.state != "valid"]
    assert other.step in (20, 21) and other.reason


def test_a_part_is_verified_when_it_is_read(tmp_path: Path) -> None:
    made = save(tmp_path, 20)
    flip_part(tmp_path)
    with pytest.raises(CorruptFile, match="fails its checksum"):
        read_part(made, "rank0.bin")
    with pytest.raises(CorruptFile, match="has no part 'rank7.bin'; it has rank0.bin, rank1.bin"):
        read_part(made, "rank7.bin")
    no_part(tmp_path)
    with pytest.raises(CorruptFile, match="cannot be read"):
        read_part(made, "rank1.bin")


@pytest.mark.parametrize("name", ["../escape", "a/b", "", ".hidden", "manifest.json"])
def test_names_that_are_no_plain_file_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="part name"):
        write_part(tmp_path, 1, name, b"x")
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_the_newest_and_what_is_being_written(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    write_part(tmp_path, 35, "rank0.bin", b"its writer was killed")
    write_part(tmp_path, 50, "rank0.bin", b"being written now")
    (tmp_path / "unrelated").mkdir()
    removed = prune(tmp_path, keep=2)
    assert sorted(path.name for path in removed) == ["step-0000000010", "step-0000000020", "step-0000000035"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-0000000030",
        "step-0000000040",
        "step-0000000050",
        "unrelated",
    ]
    assert prune(tmp_path, keep=2) == []
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, keep=0)


def test_another_jobs_checkpoints_neither_go_nor_count(tmp_path: Path) -> None:
    """A job before had got further in the same folder."""
    for step, job in ((30, "a"), (40, "a"), (3, "b"), (6, "b"), (9, "b")):
        parts = {"rank0.bin": write_part(tmp_path, step, "rank0.bin", b"x")}
        commit(tmp_path, step, parts, {"world_size": 1, "job": job})
    removed = prune(tmp_path, 2, lambda found: found.meta["job"] == "b")
    assert [path.name for path in removed] == ["step-0000000003"]
    assert [found.step for found in committed(tmp_path)] == [6, 9, 30, 40]


def test_the_manifest_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    made = save(tmp_path, 7)
    sealed = json.loads((made.path / "manifest.json").read_text())
    assert json.loads(sealed["manifest"])["parts"] == dict(made.parts)


def test_no_link_is_followed(tmp_path: Path) -> None:
    """The user has moved a checkpoint away and left a link: the link goes, what it names stays, however often the step
    is made and removed again."""
    root, archive = tmp_path / "run", tmp_path / "best"
    for step in (10, 20):
        save(root, step)
    (root / "step-0000000010").rename(archive)
    kept = sorted(os.listdir(archive))
    (root / "step-0000000010").symlink_to(archive)
    save(root, 30)
    assert prune(root) == [root / "step-0000000010"] and not (root / "step-0000000010").is_symlink()
    assert sorted(os.listdir(archive)) == kept


def test_nothing_is_pruned_where_the_folder_of_a_run_is_a_link(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path / "elsewhere", step)
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    assert prune(tmp_path / "run") == [] and len(committed(tmp_path / "run")) == 3
    assert len(prune(tmp_path / "elsewhere")) == 1


def test_folders_of_the_user_s_own_stay(tmp_path: Path) -> None:
    """Neither a name like ours nor a copy of ours makes one that may be removed; a folder in ours is the user's."""
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    own = tmp_path / "step-0000000005"
    own.mkdir()
    (own / "thesis.tex").write_text("three years")
    shutil.copytree(tmp_path / "step-0000000010", tmp_path / "step-0000000015")  # its manifest says 10
    (tmp_path / "step-0000000020" / "notes").mkdir()
    prune(tmp_path)
    left = sorted(store.step_of(path.name) or 0 for path in tmp_path.iterdir())
    assert left == [5, 15, 20, 30, 40] and (own / "thesis.tex").exists()
    assert os.listdir(tmp_path / "step-0000000020") == ["notes"]
