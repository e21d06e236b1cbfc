"""An HTML page as a tree, read by the standard library's parser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = ("meta", "br", "link", "img", "input")


@dataclass
class Node:
    """An element; ``text`` is what is directly in it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)
    text: str = ""

    def all(self, tag: str = "", kind: str = "") -> Iterator[Node]:
        """Elements below it with a tag and a class."""
        for child in self.children:
            if tag in ("", child.tag) and (not kind or kind in child.attributes.get("class", "").split()):
                yield child
            yield from child.all(tag, kind)

    def words(self) -> str:
        """All text below it."""
        return " ".join([self.text, *(child.words() for child in self.children)]).strip()

    def rows(self) -> list[dict[str, str]]:
        """Of a table, by the names in its head."""
        names = [cell.text for cell in self.all("th")]
        cells = ([cell.text for cell in row.all("td")] for row in self.all("tr"))
        return [dict(zip(names, row, strict=True)) for row in cells if row]


class Reader(HTMLParser):
    """Builds the tree, and fails where elements are not closed as they were opened."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Node("")
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data

    def close(self) -> None:
        super().close()
        assert self._open == [self.root]


def read(page: str) -> Node:
    """The page's root."""
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader.root
