"""The curves of the benchmarks as pictures: ``python -m benchmarks.plot runs/bench/*.json`` draws them from rows.

``stall_curves.svg`` is drawn from rows of :mod:`benchmarks.recovery_curves`, ``agreement.svg`` from those of
:mod:`benchmarks.scale`. Files without rows of either are passed over.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery_curves import PLACE, PLACE_LOADER, SIZE, STARTUP, SYSTEMS, WORKERS_GROW
from benchmarks.scale import AGREED
from docs.tools.drawing import Drawing
from docs.tools.figures import IMAGES

#: Points of one line, by what grows and the measured time.
Points = list[tuple[float, float]]

_STALL = re.compile(r"(?P<curve>.+): (?P<x>[\d.]+), (?P<system>.+)")
_SIMULATED = re.compile(r"(?P<x>\d+) simulated workers")
_WITH_LOADER = f"{SYSTEMS['swift']}, with a loader worker"
#: What a line is called, its colour, and whether it is dashed. Lines are drawn in this order.
_LINES = {
    SYSTEMS["torchft"]: ("soft", True),
    SYSTEMS["torchrun"]: ("soft", False),
    SYSTEMS["unprepared"]: ("edge", True),
    _WITH_LOADER: ("edge", True),
    SYSTEMS["swift"]: ("edge", False),
}
#: A picture's width; the height of the area within a panel's axes; what is left of it, right of it, above, and in all.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _PANEL_HEIGHT = 980, 180, 64, 26, 78, 316


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: what grows.
        x_label: with its unit.
        y_label: with its unit.
        lines: points by name.
        logarithmic: whether the x-axis is; the y-axis always is.
    """

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    logarithmic: bool = True


def stalls(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Panels of the rows of ``recovery_curves``: those of at least two points."""
    curves: dict[str, dict[str, Points]] = {}
    for row in rows:
        found = _STALL.fullmatch(row["case"])
        if found and row["metric"] == "stall" and row["value"] is not None:
            curve, system = found["curve"], found["system"]
            if curve == PLACE_LOADER:
                curve, system = PLACE, _WITH_LOADER
            curves.setdefault(curve, {}).setdefault(system, []).append((float(found["x"]), row["value"]))
    panels = [
        (PLACE, "place in the epoch", "batches before the failure; a sample takes 1 ms to read", True),
        (STARTUP, "start-up of the script", "time before the loop, s", False),
        (SIZE, "size of the model", "parameters, millions", True),
        (WORKERS_GROW, "number of workers", "workers", True),
    ]
    return [
        Panel(title, x_label, "stall, s", curves[curve], logarithmic)
        for curve, title, x_label, logarithmic in panels
        if any(len(points) > 1 for points in curves.get(curve, {}).values())
    ]


def agreement(rows: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """The panel of the rows of ``scale``, if there are two points."""
    points = [
        (float(found["x"]), row["value"])
        for row in rows
        if row["metric"] == AGREED and (found := _SIMULATED.fullmatch(row["case"])) and row["value"] is not None
    ]
    lines = {SYSTEMS["swift"]: points}
    title = "from a failure until all workers may connect"
    return [Panel(title, "simulated workers", "time, s", lines)] if len(points) > 1 else []


def draw(panels: Sequence[Panel], title: str) -> str:
    """An SVG of the panels, two in a row, with one scale of times."""
    columns = min(len(panels), 2)
    width = _WIDTH // columns
    picture = Drawing(_WIDTH, _PANEL_HEIGHT * math.ceil(len(panels) / columns), title)
    times = [time for panel in panels for points in panel.lines.values() for _, time in points]
    ticks = _ticks(min(times), max(times))
    for at, panel in enumerate(panels):
        corner = width * (at % columns) + _LEFT, _PANEL_HEIGHT * (at // columns) + _TOP
        _panel(picture, panel, ticks, *corner, width - _LEFT - _RIGHT)
    return picture.svg()


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten: from the last that is at most ``low`` to the first that is at least ``high``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    first = max(step for step in steps if step <= low)
    last = min((step for step in steps if step >= high and step > first), default=10 * first)
    return [step for step in steps if first <= step <= last]


def _panel(picture: Drawing, panel: Panel, ticks: Sequence[float], left: float, top: float, width: float) -> None:
    values = sorted({x for points in panel.lines.values() for x, _ in points})
    scale = math.log10 if panel.logarithmic else float
    low, wide = scale(values[0]), scale(values[-1]) - scale(values[0])

    def across(x: float) -> float:
        return left + 16 + (width - 32) * (scale(x) - low) / wide

    def down(time: float) -> float:
        share = (math.log10(time) - math.log10(ticks[0])) / (math.log10(ticks[-1]) - math.log10(ticks[0]))
        return top + _HEIGHT * (1 - share)

    picture.text(left, top - 56, panel.title, bold=True)
    for tick in ticks:
        picture.line(left, down(tick), left + width, down(tick))
        picture.text(left - 8, down(tick) + 4, f"{tick:g}", size=11.5, anchor="end")
    picture.text(left - 8, top - 14, panel.y_label, size=11.5, colour="soft", anchor="end")
    label_end = -math.inf
    for x in values:
        picture.line(across(x), top + _HEIGHT, across(x), top + _HEIGHT + 5)
        if across(x) - label_end >= 34:
            picture.text(across(x), top + _HEIGHT + 19, f"{x:,g}", size=11.5, anchor="middle")
            label_end = across(x)
    picture.text(left + width / 2, top + _HEIGHT + 38, panel.x_label, size=12, colour="soft", anchor="middle")
    key_x, key_y = left, top - 36.0
    for name, (colour, dashed) in reversed(_LINES.items()):
        if name in panel.lines and len(panel.lines) > 1:
            if key_x > left and key_x + 34 + 6.4 * len(name) > left + width:
                key_x, key_y = left, key_y + 16
            picture.line(key_x, key_y - 4, key_x + 24, key_y - 4, colour, dashed=dashed, thick=2.4)
            picture.text(key_x + 30, key_y, name, size=11.5)
            key_x += 46 + 6.4 * len(name)
    for name, (colour, dashed) in _LINES.items():
        points = sorted(panel.lines.get(name, []))
        for (x, time), (to_x, to_time) in zip(points, points[1:], strict=False):
            picture.line(across(x), down(time), across(to_x), down(to_time), colour, dashed=dashed, thick=2.4)
        for x, time in points:
            picture.box(across(x) - 4, down(time) - 4, 8, 8, colour, edge="paper", round_=4 if colour == "edge" else 1)
            if name == SYSTEMS["swift"]:
                below = down(time) + 18 if down(time) + 22 < top + _HEIGHT else down(time) - 9
                picture.text(across(x), below, f"{time:.2g}", size=11, anchor="middle", bold=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the files have rows for; returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Curves of the benchmarks, as SVG.")
    parser.add_argument("rows", type=Path, nargs="+", metavar="FILE.json", help="what benchmarks have written (--json)")
    parser.add_argument("--to", type=Path, default=IMAGES, metavar="FOLDER", help="default: docs/images")
    options = parser.parse_args(argv)
    rows = [row for path in options.rows for row in json.loads(path.read_text())["rows"]]
    pictures = {
        "stall_curves.svg": (stalls(rows), "Stall after a failure, by place in the epoch, start-up, model and workers"),
        "agreement.svg": (agreement(rows), "Time from a failure until all simulated workers may connect"),
    }
    if not any(panels for panels, _ in pictures.values()):
        parser.error("no rows of recovery_curves or scale; both write them with --json FILE")
    for name, (panels, title) in pictures.items():
        if panels:
            (options.to / name).write_text(draw(panels, title))
            print(options.to / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
