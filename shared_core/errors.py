"""Exceptions of the suite. Every message says what happened, on which rank, and what to do.

The docstrings are the entries of ``docs/troubleshooting.md``: what an error means for the job, then what to do.
``python -m docs.tools.errors`` puts them there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: The page that has an entry for each of these classes.
PAGE = "docs/troubleshooting.md"


class SwiftError(Exception):
    """Base class of every error that this product raises.

    The message says what happened, on which rank, and what to do. The errors below are more specific. This one is
    raised by itself mostly when a script cannot hand over to ``swiftrun``: in a notebook, from a child process, or
    after it has created a process group. Start the script with ``swiftrun`` instead.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.add_note(f"See {entry(type(self))}")  # the last line of a traceback; no part of the message


class ConfigError(SwiftError, ValueError):
    """An option is unknown, or its value is out of range.

    The message names the option and the values that it takes. Correct it and start again. All options:
    docs/configuration.md.
    """


class MissingExtra(SwiftError, ImportError):
    """An optional dependency is not installed.

    The message names the extra. Install it with the command in the message.
    """


class Unsupported(SwiftError, NotImplementedError):
    """The job uses a feature that cannot be recovered exactly, and is refused before anything is lost.

    Use what the message suggests instead. What is supported: docs/will_my_script_work.md.
    """


class NoUsableCheckpoint(Unsupported):
    """There are checkpoints of this command, and none of them can be used. The job ends rather than start from scratch.

    A line for each says where it lies and what is wrong with it. Mend that (who may read the folder, a disk that is not
    mounted, a newer version of this product, another job that still writes there), begin with other checkpoints
    (``--resume-from``), or start from scratch with ``checkpoint.resume="never"``: docs/checkpoints.md#resuming.
    """


class RunInUse(Unsupported):
    """Another job writes to the folder of the run. Two would overwrite and remove each other's checkpoints.

    The same command was started twice. Wait for the end of the other job or end it; or start this one from scratch with
    ``checkpoint.resume="never"``: it has a folder of its own then. The message names the other's process and machine.
    See docs/checkpoints.md#where-checkpoints-lie.
    """


class UnsupportedOptimizer(Unsupported):
    """An update of this optimizer cannot be undone, or its state cannot be moved to a replacement.

    Use the optimizer or the setting that the message suggests, or turn the option off that needs it. Which optimizers
    can be undone: docs/design/undo.md.
    """


class ReplayDivergence(SwiftError, RuntimeError):
    """The script did something else when a replacement ran its batch again. The job ends rather than train on other
    bits.

    A replacement must make the same calls, with the same inputs, as the worker that it replaces. Usual causes: a random
    generator that nobody seeds or that is not published, a branch on the time or on a file that the run itself writes,
    a counter that is not registered (``job.register``, ``plugin.register``). The message names the operation at which
    the two differ. What a replacement gets back: docs/will_my_script_work.md.
    """


class Deadlock(SwiftError, RuntimeError):
    """Ranks wait for each other, so that none of them can ever continue. The job ends within seconds, not at a
    time-out.

    The message names the place where each of them waits. They do not make the same calls in the same order: look for a
    branch on the rank around a collective, a message that nobody sends, or ranks that run different numbers of batches.
    A job with checkpoints goes back to the newest one first; if its ranks wait for each other again, it ends.
    """


class PlaceMismatch(SwiftError, RuntimeError):
    """Two ranks have called the same operation from different places of the program, such as one from epoch 1 and the
    other from epoch 2. The job ends rather than mix what does not belong together.

    The message names both ranks and both places. Usual causes: a counter or a condition of the script that a
    replacement does not get back (register it: ``job.register``, ``plugin.register``), or that is different on each
    rank, so that one runs more batches than the other. What is compared: docs/how_it_works.md#the-same-place.
    """


class ReplicaMismatch(SwiftError, RuntimeError):
    """Replicas that must be equal differ, and no majority says which is right.

    The message names the first parameter that differs. Usual causes, the likeliest first: the script changes parameters
    in a way that depends on the rank, the ranks have built different models, or memory is damaged. With three or more
    replicas a minority is replaced, and the job continues; with ``state.verify_every`` also while nothing fails, and
    with a checkpoint all go back to that. See docs/how_it_works.md#silent-corruption.
    """


class RecoveryFailed(SwiftError, RuntimeError):
    """No worker can give a replacement the state or the messages that it needs.

    All workers start again from the newest checkpoint, or from the beginning if there is none. The message says what is
    missing. Set ``checkpoint.dir`` so that little is lost: docs/checkpoints.md.
    """


class GenerationAbandoned(SwiftError, RuntimeError):
    """Another worker failed while a generation was being formed. Internal: the next generation is formed at once.

    A job never ends with this error. If one does, report it.
    """


class SurvivorGroupBroken(SwiftError, RuntimeError):
    """A worker failed while others used a survivor group. Internal: another survivor group is formed, and what is
    missing is repeated.

    A job never ends with this error. If one does, report it.
    """


class NotConnected(SwiftError, RuntimeError):
    """Members of a group did not reach each other although none failed. Internal: they try again.

    If it comes again and again, look at the network. The ports that machines use: docs/machines.md#ports.
    """


class CorruptFile(SwiftError, RuntimeError):
    """A checkpoint, a publication or a log file fails its checksum, or a part of it is gone.

    A damaged checkpoint is passed over, and the one before it is taken. If this error ends the job, no other copy was
    left. ``swiftctl checkpoints DIR`` says which checkpoints are whole; check the disk.
    """


class DamagedRecord(SwiftError, ValueError):
    """A record in the job's store is not what this product writes: something else has written to the store.

    Start the job again where nothing else reaches its ports: docs/machines.md#what-is-read.
    """


class NotAFile(SwiftError, OSError):
    """A path that must name a regular file names a pipe, a device, a folder or a socket.

    Give the path of a regular file.
    """


class NoEvents(SwiftError, OSError):
    """A file that must hold a job's events cannot be read, or holds none.

    The job is not affected. Give ``swiftctl`` the file that the job was started with (``swiftrun --events FILE``,
    ``events.jsonl`` by default).
    """


class WaitTimeout(SwiftError, TimeoutError):
    """A worker has waited for another one as long as it may.

    The message says who waited for whom, and which option sets the limit (``detection.wait_timeout_s`` in most cases).
    Look for what kept the other one: a slow start, a full machine, a frozen process. If it was only slow, raise the
    limit. All waits and their limits: docs/how_it_works.md#waits.
    """


class CollectiveTimeout(WaitTimeout, RuntimeError):
    """A collective or a message did not finish within the time-out of its group, as in torch.

    The message says where each rank stands. If all ranks are healthy, they do not make the same calls: correct the
    script. If one is slow on purpose, such as in a long evaluation on rank 0, give ``init_process_group`` a longer
    ``timeout``.
    """


class StorageFull(SwiftError, OSError):
    """There is no room to write a checkpoint. Earlier checkpoints are as they were.

    A job continues without a checkpoint that it makes by itself. Make room, or set ``checkpoint.dir`` to a larger disk.
    ``checkpoint.keep`` and ``checkpoint.quota_bytes`` limit what checkpoints take:
    docs/checkpoints.md#when-storage-fails.
    """


class OutOfResources(SwiftError, OSError):
    """The system refuses disk space, a process, a thread or a descriptor that the job cannot do without.

    The message names the limit and how to raise it, for example ``docker run --shm-size=...`` or ``ulimit -n``. See
    docs/launching.md#when-the-system-refuses-something.
    """

    def __str__(self) -> str:
        return str(self.args[-1]) if self.args else ""


class InvalidSchedule(SwiftError, ValueError):
    """A schedule breaks a dependency, the order of a worker's row, or its limit of memory.

    The message names the action. It is raised for schedules of your own; if it names one that the planner has made,
    report it. See docs/design/planner.md#notation.
    """


def entry(error: type[SwiftError]) -> str:
    """Where an error is explained: the page and its anchor, such as ``docs/troubleshooting.md#configerror``.

    The path is absolute where the page is beside the package. A class derived elsewhere shares the entry of its nearest
    base here.
    """
    nearest = next(base for base in error.__mro__ if base.__module__ == __name__)
    page = Path(__file__).resolve().parents[1] / PAGE
    return f"{page if page.is_file() else PAGE}#{nearest.__name__.lower()}"


def told(error: BaseException) -> str:
    """An error as one text for the user: its class, its message, and where it is explained if it is one of these."""
    text = f"{type(error).__name__}: {error}"
    return f"{text} (see {entry(type(error))})" if isinstance(error, SwiftError) else text
