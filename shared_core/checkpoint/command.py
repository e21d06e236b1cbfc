"""What identifies a command: the program with its arguments. Only its own next start continues with its checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shared_core.errors import ConfigError
from shared_core.plain_json import parse

#: Options of scripts that say on how many workers it runs, which may differ between two starts.
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
#: Options that say where the first start begins.
_ORIGIN = frozenset({"resume-from"})
_COUNT = re.compile(r"-?\d+|auto")
#: Words longer than this are cut at the end where they are stored, in the middle where they stand in a sentence.
_STORED, _SHOWN = 2000, 100


@dataclass(frozen=True)
class Command:
    """A program with its arguments.

    Attributes:
        key: equal in the next start of the same command.
        words: the same for people; empty where nobody noted them.
    """

    key: str = ""
    words: str = ""

    @classmethod
    def of(cls, target: str, args: Sequence[str], *mode: str) -> Command:
        """The command that runs ``target``, a path or what else the program is known by.

        ``--resume-from`` and numbers of workers among the arguments do not count.

        Args:
            target: the program.
            args: its arguments.
            mode: how it is run, where there are several ways.
        """
        counting = [*mode, target, *_counting(args)]
        key = hashlib.sha256(json.dumps(counting).encode()).hexdigest()[:16]
        words = " ".join([os.path.basename(target), *args])
        return cls(key, words[:_STORED])

    @property
    def short(self) -> str:
        """What stands in a sentence."""
        if not self.words:
            return f"command {self.key[:8] or 'unknown'}"
        if len(self.words) <= _SHOWN:
            return self.words
        half = _SHOWN // 2
        return f"{self.words[: half - 3]}...{self.words[-half:]}"  # the last arguments often tell two commands apart

    @property
    def stem(self) -> str:
        """Of the program, for the name of a folder."""
        name = self.words.split(" ")[0].removesuffix(".py")
        return re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:40].strip("_.") or "run"

    def to_json(self) -> str:
        """Inverse of :meth:`from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: str) -> Command:
        """Inverse of :meth:`to_json`; of nothing, no command.

        Raises:
            ConfigError: it names none.
        """
        try:
            found = cls(**parse(raw)) if raw else cls()
        except (ValueError, TypeError) as error:
            raise ConfigError(f"this does not name a command: {error}") from error
        if not (isinstance(found.key, str) and isinstance(found.words, str)):
            raise ConfigError(f"this does not name a command: {raw[:80]!r}")
        return found


def _counting(args: Sequence[str]) -> list[str]:
    """Arguments without those that two starts of the same command may differ in."""
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
