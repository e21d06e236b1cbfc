"""An option is a field of a dataclass that knows its kind and its meaning; a section is a dataclass of options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any

from shared_core.errors import ConfigError
from shared_core.kinds import Kind


def option(default: Any, kind: Kind, text: str, *, late: bool = False) -> Any:
    """A field of a section.

    Args:
        kind: what is allowed.
        text: what it means, in Markdown: the line of the options page.
        late: a script may say it alone: launcher and workers that run already need not know it before.
    """
    return field(default=default, metadata={"kind": kind, "text": text, "late": late})


@dataclass(frozen=True)
class Section:
    """Options that belong together. Reads its values as their kinds; what is wrong is a :class:`ConfigError`."""

    def __post_init__(self) -> None:
        for each in options_of(self):
            try:
                object.__setattr__(self, each.name, each.metadata["kind"].read(getattr(self, each.name)))
            except ValueError as error:
                raise ConfigError(f"{prefix_of(self)}{each.name} {error}") from None


def options_of(section: Section | type[Section]) -> Iterator[Field[Any]]:
    """The options of a section, without the sections inside."""
    return (each for each in fields(section) if "kind" in each.metadata)


def prefix_of(section: Section | type[Section]) -> str:
    """``checkpoint.``, before the names of a section's options; empty for those of no section."""
    name: str = getattr(section, "section", "")
    return f"{name}." if name else ""
