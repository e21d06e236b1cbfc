"""Exceptions of the suite. Every message says what happened, on which rank, and what to do."""

from __future__ import annotations


class SwiftError(Exception):
    """Base class of every error raised by the suite."""


class ConfigError(SwiftError, ValueError):
    """An option is unknown or its value is out of range."""


class MissingExtra(SwiftError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class Unsupported(SwiftError, NotImplementedError):
    """A feature that cannot be recovered exactly yet, refused before anything is lost."""


class UnsupportedOptimizer(Unsupported):
    """The optimizer keeps state that cannot be moved to a newcomer."""


class ReplayDivergence(SwiftError, RuntimeError):
    """A newcomer's replay differs from what its predecessor did: the user's code is not deterministic."""


class ReplicaMismatch(SwiftError, RuntimeError):
    """Replicas that must be equal differ (models built differently, or silent corruption)."""


class RecoveryFailed(SwiftError, RuntimeError):
    """Nobody can serve the newcomer; the job falls back to its newest checkpoint or ends."""


class GenerationAbandoned(SwiftError, RuntimeError):
    """Another failure ended the generation that was being formed. Internal: recovery starts over."""


class LaneBroken(SwiftError, RuntimeError):
    """A worker was lost while others used a lane. Internal: the executor forms another and repeats what is missing."""


class NotConnected(SwiftError, RuntimeError):
    """Members of a group did not reach each other although nobody was lost. Internal: they try again."""


class CorruptFile(SwiftError, RuntimeError):
    """A checkpoint, publication or log file fails its checksum."""


class DamagedRecord(SwiftError, ValueError):
    """What the job's store holds is not what this product writes there: something else has written to it."""


class NotAFile(SwiftError, OSError):
    """A name that must be a regular file's is that of a pipe, a device, a folder or a socket."""


class NoEvents(SwiftError, OSError):
    """A file that must hold a job's events cannot be read, or holds none."""


class WaitTimeout(SwiftError, TimeoutError):
    """A wait ran out of time; the message says what was waited for and what to do."""


class CollectiveTimeout(WaitTimeout, RuntimeError):
    """A collective or message did not finish in its group's time-out; a RuntimeError, as without this product."""


class StorageFull(SwiftError, OSError):
    """A checkpoint could not be written for want of room; earlier checkpoints are as they were."""


class OutOfResources(SwiftError, OSError):
    """The system refuses a file's room, a process, a thread or a descriptor that the job cannot do without."""

    def __str__(self) -> str:
        return str(self.args[-1]) if self.args else ""


class InvalidSchedule(SwiftError, ValueError):
    """A schedule breaks a dependency, a worker's row or its memory bound; the message names the action."""
