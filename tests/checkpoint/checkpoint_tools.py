"""What tests of the checkpoint writer share: snapshots without a job, and writers as processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from shared_core.checkpoint import store
from shared_core.checkpoint.image import write_file
from shared_core.checkpoint.spool import Sealed, Spool, Target
from shared_core.checkpoint.store import Checkpoint, committed, read_part
from shared_core.checkpoint.writer import main
from shared_core.errors import CorruptFile
from shared_core.faults import Fault, inject

ROOT = Path(__file__).parents[2]
WAIT_S = 20.0


def payload(step: int, rank: int, size: int = 3000) -> bytes:
    """Bytes that differ between steps and ranks."""
    return bytes((step * 7 + rank * 13 + i) % 251 for i in range(251)) * (size // 251 + 1)


def snapshot(
    spool: Spool,
    step: int,
    where: str | os.PathLike[str] | None,
    *,
    ranks: Sequence[int] = (0, 1),
    world_size: int = 2,
    size: int = 3000,
    only: Sequence[int] | None = None,
    keep: int = 2,
    quota_bytes: int = 0,
    **meta: Any,
) -> None:
    """Leave a snapshot of ``ranks`` (or of ``only`` some of them) in a machine's memory, as workers do."""
    folder = spool.folder_of(step)
    target = Target(os.fspath(where), keep, quota_bytes) if where is not None else None
    for rank in ranks if only is None else only:
        write_file(folder / f"rank{rank}", payload(step, rank, size))
        meta = {"run": "r", "version": step, **meta}
        spool.seal(Sealed(step, rank, world_size, tuple(ranks), (f"rank{rank}",), meta, target))


def check(found: Checkpoint | None, step: int, world_size: int = 2, size: int = 3000) -> None:
    """It is the checkpoint of ``step``, bit for bit."""
    assert found is not None and found.step == step
    assert sorted(found.parts) == [f"rank{rank}" for rank in range(world_size)]
    for rank in range(world_size):
        assert read_part(found, f"rank{rank}") == payload(step, rank, size)


def steps_of(where: Path) -> list[int]:
    """Steps of committed checkpoints."""
    return [each.step for each in committed(where)]


def start_writer(
    spool: Spool, faults: Sequence[Fault] = (), program: str = "", env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """A writer as the agent starts it; its standard input is its life line.

    Args:
        spool: of its machine.
        faults: that strike it; it is rank 0.
        program: lines to run before it.
        env: more environment.
        options: of ``Popen``.
    """
    code = f"{program}\nimport sys\nfrom shared_core.checkpoint.writer import main\nsys.exit(main(sys.argv[1:]))\n"
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]), "RANK": "0"}
    if faults:
        variables |= inject.variables(faults)
    return subprocess.Popen(
        [sys.executable, "-c", code, str(spool.folder)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables | dict(env or {}),
        **options,
    )


def finish(writer: subprocess.Popen[str], grace_s: float = WAIT_S, absent: str = "") -> tuple[int, list[str]]:
    """Let a writer finish what there is; its exit status, and what it told the user."""
    _, err = writer.communicate(f"{grace_s} {absent}\n", timeout=WAIT_S + grace_s)
    return writer.returncode, [line for line in err.splitlines() if "fault injector" not in line]


def run_writer(
    spool: Spool, faults: Sequence[Fault] = (), prepare: Callable[[], object] = lambda: None
) -> tuple[int, list[str]]:
    """Have a writer finish what there is, in a fork of this process: a fraction of the time of a new interpreter.

    Args:
        spool: of its machine.
        faults: that strike it; it is rank 0.
        prepare: called in it first.
    """
    with tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            _become_writer(spool, faults, prepare, err.fileno())
        _, status = os.waitpid(pid, 0)
        err.seek(0)
        said = [line for line in err.read().splitlines() if "fault injector" not in line]
    return os.waitstatus_to_exitcode(status), said


def _become_writer(spool: Spool, faults: Sequence[Fault], prepare: Callable[[], object], err: int) -> NoReturn:
    code = 70
    try:
        read, write = os.pipe()
        os.write(write, f"{WAIT_S}\n".encode())
        os.close(write)
        os.dup2(read, 0)
        os.dup2(err, 2)
        sys.stdin, sys.stderr = os.fdopen(0), os.fdopen(2, "w")
        inject.arm(faults, 0)
        prepare()
        code = main([str(spool.folder)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def writing(spool: Spool, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A writer that is killed in the end if it still lives."""
    writer = start_writer(spool, **options)
    try:
        yield writer
    finally:
        if writer.poll() is None:
            writer.kill()
            writer.communicate()


def newest(where: str | os.PathLike[str]) -> Checkpoint | None:
    """The newest checkpoint all of whose checksums hold."""
    for found in reversed(committed(where)):
        with suppress(CorruptFile, OSError):
            store.verify(found)
            return found
    return None


def write_part(where: Path, step: int, name: str, data: bytes) -> str:
    """Write a part of a checkpoint; its SHA-256."""
    return store.copy_part(where, step, name, [data], len(data))
