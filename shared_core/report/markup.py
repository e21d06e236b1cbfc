"""Elements of a page. Whatever is put into them is escaped when the page is written, because they are a tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from xml.etree import ElementTree

from shared_core.events import visible

Element = ElementTree.Element


def new(tag: str, text: object = "", **attributes: Any) -> Element:
    """An element; ``_`` in an attribute's name stands for ``-``, one at its end is left out. Numbers are rounded."""
    element = Element(tag, {name.rstrip("_").replace("_", "-"): _text(value) for name, value in attributes.items()})
    if text != "":
        element.text = _text(text)
    return element


def add(parent: Element, tag: str, text: object = "", **attributes: Any) -> Element:
    """As :func:`new`, at the end of another element."""
    element = new(tag, text, **attributes)
    parent.append(element)
    return element


def table(parent: Element, header: Iterable[str], rows: Iterable[Iterable[object]], numbers: int = 0) -> Element:
    """A table; the last ``numbers`` columns are aligned to the right."""
    frame = add(parent, "div", class_="scroll")
    element = add(frame, "table")
    names = list(header)
    first = len(names) - numbers
    classes = ["text" if place < first else "number" for place in range(len(names))]
    head = add(add(element, "thead"), "tr")
    for name, kind in zip(names, classes, strict=True):
        add(head, "th", name, class_=kind, scope="col")
    body = add(element, "tbody")
    for row in rows:
        line = add(body, "tr")
        for cell, kind in zip(row, classes, strict=True):
            add(line, "td", cell, class_=kind)
    return frame


def to_html(root: Element) -> str:
    return ElementTree.tostring(root, encoding="unicode", method="html")


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else visible(str(value))
