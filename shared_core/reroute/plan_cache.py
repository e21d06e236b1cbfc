"""Plans made before they are needed: a folder of JSON files that a process in the background fills."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError, CorruptFile, SwiftError
from shared_core.events import console
from shared_core.schedule.greedy import EFFORT
from shared_core.schedule.optimal import has_solver
from shared_core.schedule.planner import IterationPlan, canonical, patterns, plan, rename
from shared_core.schedule.problem import Memory, Variant
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import StageTimes, Times
from shared_core.system.process import PACKAGE_ROOT, die_with_parent, run_module

#: Seconds of the exact solver for one plan, in its own deterministic time; most actions of an iteration given to it.
EXACT_S, MOST_ACTIONS = 2.0, 1_500


@dataclass(frozen=True)
class Settings:
    """All that a plan depends on besides the failures. ``room``: micro-batches that a worker of each stage can hold."""

    topology: Topology
    times: Times = Times()
    variant: Variant = Variant.STAGGERED
    ordered: bool = False
    room: tuple[int, ...] = ()

    @property
    def memory(self) -> Memory:
        return Memory.of_stages(self.topology, self.room)

    def plan(self, failed: Collection[PlannedWorker], effort: int = EFFORT, time_limit: float = 0.0) -> IterationPlan:
        """The plan for these failures; raises what ``planner.plan`` does. ``time_limit``: of the exact solver, or 0."""
        return plan(
            self.topology,
            failed,
            times=self.times,
            variant=self.variant,
            memory=self.memory,
            ordered=self.ordered,
            time_limit=time_limit,
            threads=1,
            effort=effort,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Settings:
        """Reverse of ``to_dict``. Raises ConfigError where a field is missing, unknown or out of range."""
        try:
            times = data["times"]
            stages = tuple(StageTimes(**one) for one in times["stages"])
            own = tuple((PlannedWorker(*place), StageTimes(**one)) for place, one in times["own"])
            return cls(
                Topology(**data["topology"]),
                Times(stages, times["communication"], times["data_apart"], own),
                Variant(data["variant"]),
                data["ordered"],
                tuple(data["room"]),
            )
        except ConfigError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"these are not a planner's settings: {error!r}") from error

    @cached_property
    def key(self) -> str:
        """Name of the folder of plans for these settings: 16 hexadecimal digits of a hash."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]


class PlanStore:
    """Plans of one job, by failures, in a folder of ``folder``; plans of other settings may be beside it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.folder = folder / settings.key
        self.folder.mkdir(parents=True, exist_ok=True)
        self._read: dict[Path, IterationPlan] = {}

    def look_up(self, failed: Collection[PlannedWorker], *, exact: bool = False) -> IterationPlan | None:
        """The plan for these failures, or with ``exact`` a better one of the exact solver; None if there is none."""
        pattern, names = canonical(self.settings.topology, failed, self.settings.times)
        found = self._load(pattern, self._path(pattern, exact))
        return None if found is None else rename(found, {new: old for old, new in names.items()})

    def make(self, failed: Collection[PlannedWorker]) -> IterationPlan:
        """The plan for these failures, made and stored if it is not there; raises what ``planner.plan`` does."""
        pattern, names = canonical(self.settings.topology, failed, self.settings.times)
        path = self._path(pattern)
        found = self._load(pattern, path)
        if found is None:
            found = self.settings.plan(pattern)
            self._write(path, found)
        return rename(found, {new: old for old, new in names.items()})

    def fill(self, failures: int, wanted: Callable[[], bool] = lambda: True) -> int:
        """Make all plans for 0 to ``failures`` failures, fewest first, while ``wanted``; returns how many there are."""
        count = 0
        for number in range(failures + 1):
            for pattern in patterns(self.settings.topology, number, self.settings.times):
                if not wanted():
                    return count
                self.make(pattern)
                count += 1
        return count

    def improve(self, failures: int, wanted: Callable[[], bool] = lambda: True) -> int:
        """Give the exact solver each plan that may not be the best, fewest failures first, while ``wanted``.

        Returns how many it has improved. Does nothing without OR-tools, nor for large pipelines.
        """
        topology, count = self.settings.topology, 0
        if 3 * topology.pipelines * topology.stages * topology.micro_batches > MOST_ACTIONS or not has_solver():
            return 0
        for pattern in (
            one for number in range(1, failures + 1) for one in patterns(topology, number, self.settings.times)
        ):
            if not wanted():
                break
            if not self.make(pattern).optimal and self._load(pattern, self._path(pattern, True)) is None:
                better = self.settings.plan(pattern, time_limit=EXACT_S)
                if better.solver == "cp-sat":
                    self._write(self._path(pattern, True), better)
                    count += 1
        return count

    def fill_in_background(self, failures: int) -> subprocess.Popen[bytes]:
        """Make and improve plans in a separate process with the lowest priority, which ends with this one."""
        path = self.folder / "settings.json"
        path.write_text(json.dumps(self.settings.to_dict()), encoding="utf-8")
        command = run_module("shared_core.reroute.plan_cache", str(path), str(failures), str(os.getpid()))
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))}
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _path(self, pattern: tuple[PlannedWorker, ...], exact: bool = False) -> Path:
        return self.folder / f"{'exact' if exact else 'failed'}-{'_'.join(f'{d}.{s}' for d, s in pattern)}.json"

    def _write(self, path: Path, made: IterationPlan) -> None:
        partial = path.with_suffix(f".{os.getpid()}.part")
        partial.write_text(_sealed(made.to_json()), encoding="utf-8")
        partial.replace(path)
        self._read[path] = made

    def _load(self, pattern: tuple[PlannedWorker, ...], path: Path) -> IterationPlan | None:
        found = self._read.get(path)
        if found is None:
            try:
                found = IterationPlan.from_json(_opened(path.read_text(encoding="utf-8")))
                if found.failed != pattern or found.topology != self.settings.topology:
                    raise CorruptFile("it is a plan for something else")
            except FileNotFoundError:
                return None
            except (SwiftError, UnicodeDecodeError, OSError) as error:
                console(f"the plan {path} is damaged and will be made again: {error}")
                return None
            self._read[path] = found
        return found


def _sealed(text: str) -> str:
    return f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n"


def _opened(sealed: str) -> str:
    """The line; raises CorruptFile if its checksum does not match."""
    text, _, _ = sealed.partition("\n")
    if sealed != _sealed(text):
        raise CorruptFile("its checksum does not match")
    return text


def main() -> None:
    """What ``fill_in_background`` starts, with the arguments SETTINGS.json FAILURES PARENT."""
    path, failures, parent = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.nice(19)
    die_with_parent(parent)
    settings = Settings.from_dict(json.loads(path.read_text(encoding="utf-8")))
    store, wanted = PlanStore(path.parent.parent, settings), lambda: os.getppid() == parent
    store.fill(failures, wanted)
    store.improve(failures, wanted)


if __name__ == "__main__":
    main()
