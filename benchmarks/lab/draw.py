"""A schedule as a picture: workers downwards, time to the right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared_core.errors import ConfigError, MissingExtra
from shared_core.schedule.schedule import Action, Kind, PlannedWorker
from shared_core.schedule.timing import Slot, Timeline

#: Fill color of each kind; what a worker computes for another pipeline is hatched.
_COLOURS = {Kind.F: "#8fb9e8", Kind.I: "#9fd6a5", Kind.W: "#e6d98a", Kind.B: "#6fbf8b", Kind.OPT: "#d9a0c8"}
_MEANINGS = {
    Kind.F: "forward (F)",
    Kind.I: "backward, input (I)",
    Kind.W: "backward, weights (W)",
    Kind.B: "backward, both (B)",
    Kind.OPT: "optimizer",
}
#: Widest text, in cells; longer schedules are drawn coarser.
_CELLS = 400


def draw_text(timeline: Timeline) -> str:
    """One line a worker, one column a slot, which is as long as the shortest action; ``.`` is idle, ``-`` continues."""
    lengths = [end - start for row in timeline.rows.values() for _, start, end in row if end > start]
    last = max((row[-1].end for row in timeline.rows.values() if row), default=0.0)
    step = max(min(lengths, default=1.0), last / _CELLS)
    labels = {worker: [_label(action, worker) for action, _, _ in row] for worker, row in timeline.rows.items()}
    width = 1 + max((len(label) for row in labels.values() for label in row), default=1)
    name = max((len(str(worker)) for worker in timeline.rows), default=0)
    lines = []
    for worker, row in timeline.rows.items():
        cells = ["."] * round(last / step)
        for label, (_, start, end) in zip(labels[worker], row, strict=True):
            first = round(start / step)
            for at in range(first, min(len(cells), max(first + 1, round(end / step)))):
                cells[at] = label if at == first else "-" * (width - 1)
        text = "".join(cell.ljust(width) for cell in cells).rstrip(" .") + " "
        lines.append(f"{str(worker).ljust(name)}  {text.rstrip()}")
    return "\n".join(lines)


def draw_file(timeline: Timeline, path: Path, title: str = "") -> None:
    """Write a picture; the name ends in ``.svg``, ``.png`` (both need matplotlib) or ``.txt``, else ConfigError."""
    if path.suffix == ".txt":
        path.write_text(draw_text(timeline) + "\n", encoding="utf-8")
        return
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"cannot draw into {path}: the name must end in .svg, .png or .txt")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise MissingExtra(
            "drawing SVG and PNG needs matplotlib: pip install 'swift-recovery[all]', or draw into a .txt file"
        ) from error
    workers = sorted(timeline.rows, key=lambda worker: (worker.pipeline, worker.stage))
    last = max((row[-1].end for row in timeline.rows.values() if row), default=1.0)
    columns = last / max(1e-12, _typical(timeline))
    figure: Any = Figure(figsize=(min(60.0, max(6.0, 0.38 * columns + 1.5)), 0.36 * len(workers) + 1.4), dpi=120)
    axes = figure.subplots()
    for at, worker in enumerate(workers):
        _draw_row(axes, at, worker, timeline.rows[worker], small=columns > 150)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlim(0, last)
    axes.set_yticks(range(len(workers)), [str(worker) for worker in workers])
    for at, (above, worker) in enumerate(zip(workers, workers[1:], strict=False), start=1):
        if above.pipeline != worker.pipeline:
            axes.axhline(at - 0.5, color="#666666", linewidth=0.6)
    axes.set_xlabel("time (slots)")
    if title:
        axes.set_title(title, fontsize=10)
    seen = {action.kind for row in timeline.rows.values() for action, _, _ in row}
    patches = [
        Patch(facecolor=_COLOURS[kind], edgecolor="black", label=_MEANINGS[kind]) for kind in Kind if kind in seen
    ]
    patches.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="re-routed"))
    axes.legend(handles=patches, ncols=len(patches), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    figure.savefig(path, bbox_inches="tight")


def _draw_row(axes: Any, at: int, worker: PlannedWorker, row: Sequence[Slot], small: bool) -> None:
    for action, start, end in row:
        foreign = action.kind is not Kind.OPT and action.pipeline != worker.pipeline
        axes.broken_barh(
            [(start, end - start)],
            (at - 0.4, 0.8),
            facecolors=_COLOURS[action.kind],
            edgecolor="#333333",
            linewidth=0.5,
            hatch="////" if foreign else None,
        )
        if not small:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8} if foreign else None
            axes.text((start + end) / 2, at, _label(action, worker), ha="center", va="center", fontsize=6, bbox=box)


def _typical(timeline: Timeline) -> float:
    lengths = sorted(end - start for row in timeline.rows.values() for _, start, end in row if end > start)
    return lengths[len(lengths) // 4] if lengths else 1.0


def _label(action: Action, worker: PlannedWorker) -> str:
    return action.text(worker).removeprefix(str(action.stage))
