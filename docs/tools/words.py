"""How many words the pages have, and old words that are left in them: ``python -m docs.tools.words``.

A word has a letter or a digit: the lines of a table and lone marks are none.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Most words of the README, of the pages in the navigation together, and of those outside of it.
README, NAVIGATION, DESIGN = 600, 25_000, 12_000
#: What code makes, which has the words of the code, and code that pages quote.
_QUOTED = re.compile(
    r"<!-- (?:options|errors): .*?<!-- end of \w+ -->|^```.*?^```|`[^`\n]*`|\]\([^)\s]*\)", re.DOTALL | re.MULTILINE
)
_GONE = r"(?:workers?|ranks?|machines?|stages?|replicas?|peers?|ones?|shards?|nobody|somebody)"
#: Words that mean a failure, a replacement, a step boundary or to continue, and are not the field's.
OLD = re.compile(
    rf"""\bnewcomers? | \bbatch\ tops?\b | \bpredecessors?\b | \bbeg[aiu]ns?\ anew | \b(?:go|goes|going|went|gone)\ on\b
    | \bprepared\ standbys?\b | \blost\ {_GONE}\b | \b{_GONE}\ (?:is|are|was|were|be|been|being)\ lost\b
    | \bloss(?:es)?\ of\ (?:a|the|all|any|one|several|whole)?\s?{_GONE}\b
    | \b(?:after|without|at|before|in|during|through|between|with|survives?)\ (?:a|one|two|the|each)\ loss(?:es)?\b""",
    re.VERBOSE | re.IGNORECASE,
)
#: What :data:`OLD` finds, for its test.
OLD_TEXTS = (
    "A newcomer takes its place.",
    "at each batch top",
    "what its predecessor had",
    "the others go on",
    "it begins anew",
    "a prepared standby",
    "the loss of a worker, of all workers",
    "After a loss they wait.",
    "a lost worker",
    "if a worker is lost",
)


def navigation() -> list[Path]:
    """The pages that the site lists, the README first."""
    docs = ROOT / "docs"
    return [ROOT / "README.md", *sorted(docs.glob("*.md")), *sorted((docs / "api").glob("*.md"))]


def design() -> list[Path]:
    """The pages for who changes the code or checks the papers."""
    return sorted((ROOT / "docs" / "design").glob("*.md"))


def count(page: Path) -> int:
    """The words of a page, code that users copy included."""
    return sum(any(map(str.isalnum, word)) for word in page.read_text(encoding="utf-8").split())


def old(page: Path) -> list[str]:
    """The old words of a page, outside of code and of what code makes, each with what stands around it."""
    text = _QUOTED.sub(" ", page.read_text(encoding="utf-8"))
    return [" ".join(text[max(found.start() - 30, 0) : found.end() + 30].split()) for found in OLD.finditer(text)]


def main() -> None:
    """Print a table."""
    for name, pages, most in (("in the navigation", navigation(), NAVIGATION), ("docs/design", design(), DESIGN)):
        for page in pages:
            print(f"{count(page):7,}  {page.relative_to(ROOT)}")
        print(f"{sum(map(count, pages)):7,}  {name}: {len(pages)} pages, at most {most:,} words\n")
    for page in (*navigation(), *design()):
        for words in old(page):
            print(f"old words in {page.relative_to(ROOT)}: ... {words} ...")


if __name__ == "__main__":
    main()
