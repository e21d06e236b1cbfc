"""Plans of re-routing and of logging, what they are made from, and the folder where they lie ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from benchmarks.lab.plan_logging import profile_of
from shared_core.errors import CorruptFile
from shared_core.pipeline.grouping import Budget, plan_groups, trade_off
from shared_core.reroute.plan_cache import PlanStore, Settings, _sealed
from shared_core.schedule.planner import IterationPlan, plan
from shared_core.schedule.schedule import PlannedWorker, Topology
from shared_core.schedule.timing import StageTimes, Times

from ..harness import Target, exact, only_errors, stable

topologies = st.builds(Topology, st.integers(2, 3), st.integers(1, 3), st.integers(1, 4))
failures = st.sampled_from([(), (PlannedWorker(1, 0),)])
settings = st.builds(
    lambda topology, forward, ordered: Settings(topology, Times((StageTimes(forward),)), ordered=ordered),
    topologies,
    st.floats(0.1, 9),
    st.booleans(),
)
measured = st.integers(1, 5).flatmap(
    lambda machines: st.fixed_dictionaries(
        {
            "machines": st.lists(
                st.fixed_dictionaries({"compute_s": st.floats(0.1, 9)}, optional={"stages": st.integers(1, 3)}),
                min_size=machines,
                max_size=machines,
            ),
            "boundary_bytes": st.lists(st.integers(0, 1 << 30), min_size=machines - 1, max_size=machines - 1),
            "steps_between_checkpoints": st.integers(1, 100),
        },
        optional={"micro_batches": st.integers(1, 8), "step_s": st.floats(0.1, 9)},
    )
)


def _plan(value: Any, _folder: Path) -> bytes:
    topology, failed = value
    return plan(topology, failed).to_json().encode()


def _text(data: bytes) -> str:
    """As files are read."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptFile("no text") from error


def _read_plan(data: bytes, _folder: Path | None = None) -> IterationPlan:
    found = IterationPlan.from_json(_text(data))
    for d, s in found.failed:
        found.host(d, s, 0)
    return found


_STORED = Settings(Topology(2, 2, 3))


def _store(folder: Path) -> PlanStore:
    return PlanStore(folder / "plans", _STORED)


def _write_stored(_value: Any, folder: Path) -> bytes:
    store = _store(folder)
    for path in store.folder.glob("*"):
        path.unlink()
    store.make([PlannedWorker(1, 0)])
    (path,) = store.folder.glob("failed-*.json")
    return path.read_bytes()


def _read_stored(data: bytes, folder: Path) -> Any:
    store = _store(folder)
    (path,) = store.folder.glob("failed-*.json")
    path.write_bytes(data)
    found = store.look_up([PlannedWorker(1, 0)])
    if found is None:
        raise CorruptFile("it will be made again")
    return found


def _seal(data: bytes) -> bytes:
    return _sealed(data.decode(errors="replace")).encode()


def _inner(value: Any, folder: Path) -> bytes:
    return _write_stored(value, folder).split(b"\n")[0]


def _read_settings(data: bytes, _folder: Path | None = None) -> Settings:
    found = Settings.from_dict(_json(data))
    _ = found.key
    return found


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFile("no JSON") from error


def _read_measured(data: bytes, _folder: Path) -> Any:
    profile = profile_of(_json(data))
    trade_off(profile)
    return plan_groups(profile, Budget(1e9))


TARGETS = [
    Target(
        "plans.plan",
        st.tuples(topologies, failures),
        _plan,
        _read_plan,
        stable(lambda found: found.to_json().encode(), _read_plan),
        count=12,
    ),
    Target("plans.stored", st.none(), _write_stored, _read_stored, exact, count=1),
    Target("plans.stored_sealed", st.none(), _inner, _read_stored, only_errors, seal=_seal, count=1),
    Target(
        "plans.settings",
        settings,
        lambda value, _: json.dumps(value.to_dict()).encode(),
        _read_settings,
        stable(lambda value: json.dumps(value.to_dict()).encode(), _read_settings),
    ),
    Target("plans.measured", measured, lambda value, _: json.dumps(value).encode(), _read_measured, only_errors),
]
