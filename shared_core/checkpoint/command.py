"""What identifies a command: the program with its arguments. Only its own next start continues with its checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shared_core.codec import OsText, fit
from shared_core.errors import ConfigError
from shared_core.plain_json import parse

#: Options of scripts that set the number of workers, which may differ between two starts.
_WORKERS = frozenset(
    {
        "devices",
        "trainer.devices",
        "nnodes",
        "num-nodes",
        "trainer.num-nodes",
        "nproc-per-node",
        "num-processes",
        "num-machines",
    }
)
#: Options that set where the first start begins.
_ORIGIN = frozenset({"resume-from"})
_COUNT = re.compile(r"-?\d+|auto")
#: Longer words are cut at the end where they are stored, in the middle where they stand in a sentence.
_STORED, _SHOWN = 2000, 100


@dataclass(frozen=True)
class Command:
    """A program with its arguments.

    Attributes:
        key: equal in the next start of the same command.
        words: the same for people; empty if they were not noted.
    """

    key: str = ""
    words: OsText = ""

    @classmethod
    def of(cls, target: str, args: Sequence[str], *mode: str) -> Command:
        """The command that runs ``target``, a path or another name of the program; ``mode`` tells apart ways to run it.
        ``--resume-from`` and numbers of workers among the arguments do not count.
        """
        counting = [*mode, target, *_counting(args)]
        key = hashlib.sha256(json.dumps(counting).encode()).hexdigest()[:16]
        words = " ".join([os.path.basename(target), *args])
        return cls(key, words[:_STORED])

    @property
    def short(self) -> str:
        if not self.words:
            return f"command {self.key[:8] or 'unknown'}"
        if len(self.words) <= _SHOWN:
            return self.words
        half = _SHOWN // 2
        return f"{self.words[: half - 3]}...{self.words[-half:]}"  # the last arguments often tell two commands apart

    @property
    def stem(self) -> str:
        name = self.words.split(" ")[0].removesuffix(".py")
        return re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:40].strip("_.") or "run"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: str) -> Command:
        """Inverse of :meth:`to_json`; an empty text gives an empty command. Raises ConfigError for anything else."""
        try:
            found: Command = fit(parse(raw), cls) if raw else cls()
            return found
        except ValueError as error:
            raise ConfigError(f"this does not name a command: {error}") from error


def _counting(args: Sequence[str]) -> list[str]:
    """Arguments without those in which two starts of the same command may differ."""
    counting: list[str] = []
    skip = False
    for word, following in itertools.pairwise([*args, ""]):
        if skip:
            skip = False
            continue
        name, equals, value = word.partition("=")
        option = name.removeprefix("--").replace("_", "-") if name.startswith("--") else ""
        if not equals and not following.startswith("--"):
            value = following
        if option in _ORIGIN or (option in _WORKERS and _COUNT.fullmatch(value)):
            skip = not equals and bool(value)
        else:
            counting.append(word)
    return counting
