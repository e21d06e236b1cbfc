"""Event files, and the timelines and tables that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shared_core.events import KINDS, Event, EventLog, by_run, read_events
from shared_core.report import format_recoveries, format_timeline, history_of, recoveries, to_page, to_trace
from shared_core.report.timeline import format_runs
from shared_core.system.jobdir import Card
from shared_core.watch.text import format_view
from shared_core.watch.view import Live, view_of

from ..harness import Target, stable
from ..json_values import plain_json, text_keys

#: What the product says with its events.
_SAID: dict[str, st.SearchStrategy[Any]] = {
    "failed": st.lists(st.integers(0, 3), max_size=2),
    "cause": st.text(max_size=12),
    "detected": st.floats(0, 1e6),
    "ready_s": st.floats(0, 9),
    "stall_s": st.floats(0, 9),
    "start_s": st.floats(0, 9),
    "bytes_moved": st.integers(0, 1 << 40),
    "boundary": st.none() | st.integers(0, 9),
    "resolution": st.text(max_size=9),
    "recomputed_steps": st.integers(0, 3),
    "stay": st.lists(st.integers(0, 3), max_size=2),
    "absent": st.lists(st.integers(0, 3), max_size=2),
    "workers": st.integers(1, 4),
    "pids": st.dictionaries(st.sampled_from(["0", "1", "x"]), st.integers(0, 99), max_size=2),
    "seconds": st.floats(0, 9),
    "world_size": st.integers(1, 4),
    "restart": st.integers(0, 2),
    "boundaries": st.integers(0, 9),
    "exchange_s": st.floats(0, 9),
    "host": st.text(max_size=9),
}
said = st.fixed_dictionaries({}, optional=_SAID) | st.dictionaries(
    text_keys.filter(lambda key: key not in ("kind", "rank", "generation", "self")), plain_json, max_size=2
)
files = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.integers(-1, 3), st.integers(0, 3), said, st.sampled_from(["", "aaaa", "bbbb"])
    ),
    min_size=1,
    max_size=8,
)


def _write(value: Any, folder: Path) -> bytes:
    path = folder / "events.jsonl"
    path.write_bytes(b"")
    for kind, rank, generation, fields, run in value:
        EventLog(path, run).emit(kind, rank=rank, generation=generation, **fields)
    return path.read_bytes()


def _read(data: bytes, folder: Path) -> list[Event]:
    path = folder / "read.jsonl"
    path.write_bytes(data)
    return list(read_events(path, []))


def _report(data: bytes, folder: Path) -> list[Event]:
    """As ``swiftctl events`` and ``swiftctl status`` do, with and without ``--json``, and ``swiftctl report``."""
    found = _read(data, folder)
    runs = by_run(found)
    for run, events in runs.items():
        grouped = recoveries(events)
        format_timeline(events)
        format_recoveries(grouped, events[0].time)
        json.dumps([one.to_dict() for one in grouped])
        view = view_of(events, Live(events[-1].time, True, Card(run)))
        json.dumps(view.to_dict(), allow_nan=False)
        format_view(view)
        history = history_of(events)
        to_page(history).encode()
        json.dumps(to_trace(history), allow_nan=False)
        format_runs(run, [(each, others[0].time) for each, others in runs.items()])
    return found


def _again(events: list[Event]) -> bytes:
    return "".join(f"{event.to_json()}\n" for event in events).encode()


def _decoded(data: bytes) -> list[Event]:
    import tempfile

    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        return _read(data, Path(folder))


TARGETS = [Target("events.file", files, _write, _report, stable(_again, _decoded), count=40)]
