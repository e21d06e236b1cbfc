"""Figures, drawn without a display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared_core.errors import MissingExtra

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of a size in inches.

    Raises:
        MissingExtra: if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtra("drawing needs matplotlib: pip install 'swift-recovery[all]'") from error
    matplotlib.use("agg")
    from matplotlib.figure import Figure

    return Figure(figsize=size, layout="constrained")
