"""The entries of the errors on the page about troubleshooting: ``python -m docs.tools.errors`` writes them there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from shared_core import errors

PAGE = Path(__file__).parents[2] / errors.PAGE
BEGIN = "<!-- errors: python -m docs.tools.errors -->\n"
END = "<!-- end of errors -->\n"
_PAGE_NAME = re.compile(r"(?<![\w/(\[])docs/([\w/]+\.md)(#[\w-]+)?")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def classes() -> list[type[errors.SwiftError]]:
    """All errors, in the order of the module."""
    return [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.SwiftError)]


def entries() -> str:
    """An entry for each error, as Markdown: its docstring under its name."""
    return "\n".join(f"### {each.__name__}\n\n{_markdown(inspect.getdoc(each) or '')}\n" for each in classes())


def with_entries(page: str) -> str:
    """The page with the entries as the docstrings have them now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{entries()}\n{END}{after}"


def _markdown(text: str) -> str:
    text = _PAGE_NAME.sub(_link, text.replace("``", "`"))
    # One line a paragraph, as on the other pages.
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _link(name: re.Match[str]) -> str:
    """A link whose words are the heading that it leads to."""
    titles = _HEADING.findall((PAGE.parent / name[1]).read_text())
    wanted = [each for each in titles if name[2] in (None, "#" + anchor(each))]
    return f"[{wanted[0]}]({name[1]}{name[2] or ''})"


def anchor(title: str) -> str:
    """Of a heading, as code hosts and the site make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(with_entries(PAGE.read_text()))
