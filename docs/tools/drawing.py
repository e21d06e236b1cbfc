"""Boxes, arrows and words as SVG, in colours that follow the page's: light or dark."""

from __future__ import annotations

from html import escape
from typing import Any

_LIGHT = {
    "paper": "#ffffff",
    "panel": "#f3f5f9",
    "ink": "#1f2430",
    "soft": "#646c79",
    "line": "#aab2bf",
    "blue": "#cfe0fa",
    "green": "#cdebd3",
    "teal": "#a9d9b9",
    "sand": "#f4e5b5",
    "pink": "#f2cfe3",
    "red": "#c62f3d",
    "edge": "#3b6fd4",
    "good": "#2c8a50",
}
_DARK = {
    "paper": "#1e2129",
    "panel": "#282c37",
    "ink": "#e4e7ee",
    "soft": "#a3abba",
    "line": "#596273",
    "blue": "#2c4674",
    "green": "#2a5b3d",
    "teal": "#22694a",
    "sand": "#6a5620",
    "pink": "#6d3557",
    "red": "#ff7a85",
    "edge": "#7fa9ff",
    "good": "#69cf91",
}


def _colours(values: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in values.items())


# Shown by itself, a drawing follows the system; inside a page of the site it follows the switch of the page.
_STYLE = (
    f".drawn{{{_colours(_LIGHT)}font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}}"
    f"@media (prefers-color-scheme:dark){{.drawn{{{_colours(_DARK)}}}}}"
    f"[data-md-color-scheme=default] .drawn{{{_colours(_LIGHT)}}}"
    f"[data-md-color-scheme=slate] .drawn{{{_colours(_DARK)}}}"
    ".drawn text{fill:var(--ink)}.drawn .mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
)


class Drawing:
    """A picture of ``width`` by ``height`` units, the origin at its upper left.

    Args:
        width: in units; 13 are the height of ordinary words.
        height: in units.
        title: what it shows, for those who cannot see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._head = (
            f'<svg class="drawn" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">'
            f"<title>{escape(title)}</title><style>{_STYLE}</style>"
            f'<rect width="{width:g}" height="{height:g}" rx="8" style="fill:var(--paper)"/>'
        )
        self._parts: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: float = 13,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
        mono: bool = False,
    ) -> None:
        """Words whose baseline is at ``y``; ``anchor`` is ``start``, ``middle`` or ``end``."""
        kind = ' class="mono"' if mono else ""
        style = f"font-size:{size:g}px;fill:var(--{colour});text-anchor:{anchor}" + (";font-weight:600" if bold else "")
        self._parts.append(f'<text x="{x:g}" y="{y:g}"{kind} style="{style}">{escape(words)}</text>')

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "panel",
        *,
        edge: str = "line",
        dashed: bool = False,
        thick: float = 1,
        round_: float = 5,
    ) -> None:
        """A box with round corners."""
        dash = ";stroke-dasharray:5 4" if dashed else ""
        inside = "none" if fill == "none" else f"var(--{fill})"
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_:g}" '
            f'style="fill:{inside};stroke:var(--{edge});stroke-width:{thick:g}{dash}"/>'
        )

    def line(
        self,
        x: float,
        y: float,
        to_x: float,
        to_y: float,
        colour: str = "line",
        *,
        dashed: bool = False,
        thick: float = 1,
    ) -> None:
        """A straight line."""
        dash = ";stroke-dasharray:4 4" if dashed else ""
        self._parts.append(
            f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" '
            f'style="fill:none;stroke:var(--{colour});stroke-width:{thick:g}{dash}"/>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "ink", **style: Any) -> None:
        """A straight line with a point at its end; ``style`` as of :meth:`line`."""
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        along_x, along_y = (to_x - x) / length, (to_y - y) / length
        back_x, back_y = to_x - 8 * along_x, to_y - 8 * along_y
        self.line(x, y, back_x, back_y, colour, **{"thick": 1.4} | style)
        corners = (
            (to_x, to_y),
            (back_x - 4 * along_y, back_y + 4 * along_x),
            (back_x + 4 * along_y, back_y - 4 * along_x),
        )
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self._parts.append(f'<polygon points="{points}" style="fill:var(--{colour})"/>')

    def cross(self, x: float, y: float, size: float = 7) -> None:
        """Where something is killed."""
        self.line(x - size, y - size, x + size, y + size, "red", thick=3)
        self.line(x - size, y + size, x + size, y - size, "red", thick=3)

    def svg(self) -> str:
        """The file."""
        return self._head + "".join(self._parts) + "</svg>\n"
