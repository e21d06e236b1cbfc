"""The curves of the recovery benchmark as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shared_core.report.figures import new_figure


def draw(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], path: Path) -> None:
    """Draw stalls in seconds over what grows, one panel a curve of at least two points.

    Args:
        curves: for each curve and system, pairs of value and stall.
        path: of the picture; its ending says in which format.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    drawn = {name: systems for name, systems in curves.items() if any(len(points) > 1 for points in systems.values())}
    figure = new_figure((4.2 * max(len(drawn), 1), 3.2))
    panels = figure.subplots(1, max(len(drawn), 1), squeeze=False)[0]
    for panel, (name, systems) in zip(panels, drawn.items(), strict=False):
        for system, points in systems.items():
            panel.plot(*zip(*points, strict=True), marker="o", label=system)
        panel.set_xlabel(name)
        panel.set_ylabel("stall, s")
        panel.set_xscale("symlog")
        panel.set_yscale("log")
        panel.legend(fontsize=7)
    figure.savefig(path)
