"""The options as the page that describes them: ``python -m shared_core.config.page``."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from shared_core.config import SECTIONS, SwiftConfig
from shared_core.config.sections import Section, options_of, prefix_of


def page() -> str:
    lines: list[str] = []
    every: tuple[type[Section], ...] = (SwiftConfig, *SECTIONS.values())
    for section in every:
        name = prefix_of(section).rstrip(".")
        if name:
            doc = (section.__doc__ or "").partition("\n")[0].replace("``", "`")
            lines += ["", f"### `{name}`", "", doc, ""]
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [
            f"| `{prefix_of(section)}{each.name}` | {_value(each.default)} | {each.metadata['text']} |"
            for each in options_of(section)
        ]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f'`"{value}"`' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def help_of(name: str) -> str:
    """What an option means, for the command line: without links."""
    section, _, last = name.rpartition(".")
    owner = SECTIONS[section] if section else SwiftConfig
    text: str = next(each for each in fields(owner) if each.name == last).metadata["text"]
    text = re.sub(r" ?\(\[[^\]]*\]\([^)]*\)\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("`", "")
    return text[:1].upper() + text[1:] + "."


if __name__ == "__main__":
    print(page(), end="")
