"""From ``python train.py`` to ``swiftrun``: the process becomes the launcher of the same script and arguments."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

from shared_core.config import variable_of
from shared_core.errors import SwiftError
from shared_core.events import console
from shared_core.kinds import whole_of_environment
from shared_core.protocol import worker_env
from shared_core.system import process

_warned = False
#: End of a message about an option that the script has and its launcher has not, with its variable and value.
NOT_TOLD = (
    " is set in the script alone, and the launcher needs it too: set {}={}, pass swiftrun --swift-config FILE (or "
    "--on-failure), or start the script with 'python', which starts swiftrun with the script's options"
)
#: Debuggers that are started with ``python -m``.
_DEBUGGERS = frozenset({"pdb", "ipdb", "pudb", "debugpy"})
LEFT_BEHIND = (
    "the debugger ({}) is left behind: this process becomes swiftrun, and the script runs in its workers. To debug a "
    "rank, have the script call debugpy.listen() and debugpy.wait_for_client() in it; or train in one process "
    "(Lightning: devices=1, Accelerate: SWIFT_RECOVERY=0)"
)


def launched_by_swiftrun() -> bool:
    """Whether this process is a worker of ``swiftrun``."""
    return worker_env.launched()


def under_plain_torchrun() -> bool:
    """Whether this process is a worker of ``torchrun`` (or of a launcher built on it), whose agent kills survivors."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not worker_env.launched()


def warn_plain_torchrun_once() -> None:
    """Say, on rank 0 and once, that survivors cannot be kept alive under plain torchrun."""
    global _warned
    if _warned or not under_plain_torchrun():
        return
    _warned = True
    if os.environ.get("RANK", "0") == "0":
        console(
            "started by plain torchrun, whose agent kills all workers when one fails: survivors cannot be kept "
            "alive, only checkpoints help. Start the same command with swiftrun instead of torchrun."
        )


def leave_torchrun(standbys: int, options: Mapping[str, Any]) -> None:
    """Under plain ``torchrun`` on one machine: the worker of local rank 0 becomes ``swiftrun`` with as many workers,
    and the others wait and end when it does. Returns only where there are several machines, which share no secret, and
    where something else has set a part of torchrun's variables.

    ``torchrun`` sees the end of ``swiftrun`` as that of a worker: it fails with it, starts it again as often as it was
    told, and its SIGTERM makes a last checkpoint. If ``torchrun`` is killed, ``swiftrun`` is told to end.

    Args:
        standbys: see :func:`hand_over`.
        options: see there.

    Raises:
        SwiftError: where a script cannot be started again, see :func:`hand_over`.
    """
    if not _TORCHRUN.issubset(os.environ) or int(os.environ["GROUP_WORLD_SIZE"]) > 1:
        return
    workers = int(os.environ["LOCAL_WORLD_SIZE"])
    if int(os.environ["LOCAL_RANK"]) > 0:
        launcher = int(_store_of_torchrun().get(_LAUNCHER))
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(launcher)], [], [])
        os._exit(0)  # if it failed, torchrun has seen that
    if workers > 1:
        _store_of_torchrun().set(_LAUNCHER, str(os.getpid()))
    console("started by torchrun: continuing under swiftrun, which can replace a failed worker")
    process.die_with_parent(os.getppid(), signal.SIGTERM)
    for name in [each for each in os.environ if each.startswith("TORCHELASTIC_") or each in _TORCHRUN]:
        del os.environ[name]
    hand_over(workers, standbys, options)


#: Key of the process id of ``swiftrun`` in torchrun's store.
_LAUNCHER = "launcher"
#: What torchrun tells its workers.
_TORCHRUN = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE ROLE_NAME "
    "MASTER_ADDR MASTER_PORT".split()
)


def _store_of_torchrun() -> Any:
    """The part of its agent's store that this start of the workers uses."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    where, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(where, port, is_master=False, timeout=timedelta(seconds=60))
    return PrefixStore(f"swift-recovery/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)


def srun_tasks() -> int:
    """Tasks that ``srun`` has started of what this process belongs to; 1 outside ``srun``, as in a batch script."""
    return whole_of_environment("SLURM_STEP_NUM_TASKS", 1)


def warn_srun_once(alone: bool = False) -> None:
    """Say, in the first task and once, that ``srun`` keeps no survivors alive where it has started several tasks.
    ``alone``: the tasks do not know of each other, and each is a training of its own.
    """
    global _warned
    tasks = srun_tasks()
    if _warned or tasks == 1 or worker_env.launched():
        return
    _warned = True
    if os.environ.get("SLURM_PROCID", "0") == "0":
        console(
            f"started as {tasks} tasks by srun, which cannot replace one that fails: survivors cannot be kept alive."
            + (" WORLD_SIZE is not set, so each task trains alone." if alone else "")
            + f" Start one task instead: srun -N1 -n1 -c{tasks} swiftrun --nproc-per-node {tasks} SCRIPT"
        )


def say_alone_once(also: str = "") -> None:
    """Say, once, that nothing has started this process as one of several: where it is one, nothing can be recovered.
    ``also``: another way to start several workers, in words.
    """
    global _warned
    processes = sys.modules.get("multiprocessing")
    child = processes is not None and processes.parent_process() is not None
    if _warned or child or not started_alone():
        return
    _warned = True
    console(f"one process: nothing to recover from; start with swiftrun --nproc-per-node N SCRIPT{also}")


def started_alone() -> bool:
    """Whether no launcher has started this process as one of several."""
    return srun_tasks() == 1 and not worker_env.launched() and _STARTED.isdisjoint(os.environ)


#: Variables of which one is set where a launcher has started several processes: torchrun and its like, or MPI.
_STARTED = frozenset({"RANK", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"})


def hand_over(nproc: int, standbys: int = 1, options: Mapping[str, Any] | None = None) -> NoReturn:
    """Become ``swiftrun`` for the running script; does not return, and keeps nothing of this process.

    Args:
        standbys: see ``swiftrun --standbys``.
        options: options of :class:`shared_core.SwiftConfig`, by name; those in the environment go before them.

    Raises:
        SwiftError: where it cannot be: in a notebook or interactive session, after a process group was created, or
            under another launcher.
    """
    if nproc < 1:
        raise SwiftError(f"cannot hand over to swiftrun with {nproc} workers: at least 1 is needed")
    command = _command()
    if debugger := _debugger():
        console(LEFT_BEHIND.format(debugger))
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[worker_env.HANDED_OVER] = "1"
    for name, value in (options or {}).items():
        os.environ.setdefault(variable_of(name), str(value))
    flags = ["--standbys", str(standbys), "--nproc-per-node", str(nproc)]
    os.execv(sys.executable, process.run_module("shared_core.cli.swiftrun", *flags, *command))


def _debugger() -> str:
    """Name of the debugger that runs this process; empty if there is none."""
    if "pydevd" in sys.modules:
        return "debugpy" if "debugpy" in sys.modules else "pydevd"
    # With no breakpoint set, pdb stops tracing once it is told to continue.
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] if "-m" in sys.orig_argv else []
    if module and module[0] in _DEBUGGERS:
        return module[0]
    owner = getattr(sys.gettrace(), "__self__", None)
    if any(kind.__module__ == "bdb" for kind in type(owner).__mro__):
        return type(owner).__module__.partition(".")[0]
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return str(monitoring.get_tool(monitoring.DEBUGGER_ID) or "") if monitoring is not None else ""


def _command() -> list[str]:
    """Script and arguments of this process, as ``swiftrun`` wants them. Raises SwiftError where there are none."""
    how = "Start it from a shell with: swiftrun --nproc-per-node N SCRIPT ..."
    main = sys.modules["__main__"]
    if getattr(sys, "ps1", None) or sys.flags.interactive or getattr(main, "__file__", None) is None:
        raise SwiftError(
            "cannot hand over to swiftrun: this is a notebook or an interactive session, there is no script to run "
            f"again. {how}"
        )
    if worker_env.launched():
        raise SwiftError("cannot hand over to swiftrun: this process is already one of its workers")
    if under_plain_torchrun() or whole_of_environment("WORLD_SIZE", 1) > 1:
        raise SwiftError(
            "cannot hand over to swiftrun: another launcher has started this process already "
            f"(WORLD_SIZE={os.environ.get('WORLD_SIZE')}). Use swiftrun in its place."
        )
    if srun_tasks() > 1:
        raise SwiftError(
            f"cannot hand over to swiftrun: srun has started {srun_tasks()} tasks of this script, and each would start "
            "a job of its own. Start one: srun -N1 -n1 -c N swiftrun --nproc-per-node N SCRIPT"
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise SwiftError(f"cannot hand over to swiftrun: a process group exists already in this process. {how}")
    processes = sys.modules.get("multiprocessing")
    if processes is not None and processes.parent_process() is not None:
        raise SwiftError(f"cannot hand over to swiftrun from a child process of multiprocessing. {how}")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":  # python -m
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    return [sys.argv[0] if os.path.exists(sys.argv[0]) else str(main.__file__), *sys.argv[1:]]
