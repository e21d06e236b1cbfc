"""The tables of the page about benchmarks: ``python -m docs.tools.benchmarks [FILE...]`` writes them there.

``benchmarks/tables.md`` is their text. Where a number stands it has ``{benchmark; case; metric; format}``, and the
target ``{benchmark; case; metric; target}``; of several cases (``*``) the largest value is meant. The numbers are in
``docs/benchmarks.json``: of each run the rows that the tables have. FILEs are what benchmarks have written with
``--json``; their rows take the place of older ones. A quick run does so only among quick ones, and is shown only where
there is no other, or where the text says ``{benchmark --quick; ...}``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEXT, PAGE, NUMBERS = ROOT / "benchmarks/tables.md", ROOT / "docs/benchmarks.md", ROOT / "docs/benchmarks.json"
BEGIN = "<!-- tables: python -m docs.tools.benchmarks -->\n"
END = "<!-- end of tables -->\n"
_CELL = re.compile(r"\{([^{};]+); ([^{};]+); ([^{};]+); ([^{};]+)\}")
#: Units that no number needs.
_BARE = ("", "ratio", "times")
#: Load of the machine before a run from which on it counts as busy.
BUSY = 1.0

#: As ``--json`` writes it: ``command``, ``commit``, ``date``, ``machine``, ``load``, ``seconds``, ``rows``. Runs of
#: before that was written have no machine and load, but a ``note``; their commits are those in which the page got them.
Run = dict[str, Any]


def name_of(run: Run) -> str:
    """The benchmark, and ``--quick`` where it was a quick run."""
    words = run["command"].split()
    return str(words[0] + (" --quick" if "--quick" in words else ""))


def found(runs: Sequence[Run], name: str, case: str, metric: str) -> list[tuple[Run, Run]]:
    """Rows with their runs: of each case that matches the newest, from quick runs only where there is no other.

    Raises:
        LookupError: there is none.
    """
    newest = {
        row["case"]: (run, row)
        for wanted in (name.removesuffix(" --quick") + " --quick", name)
        for run in runs
        if name_of(run) == wanted
        for row in run["rows"]
        if row["metric"] == metric and fnmatchcase(row["case"], case)
    }
    if not newest:
        raise LookupError(f"no run has a row of {name}: {case}: {metric}")
    return list(newest.values())


def _shown(rows: Sequence[Run], form: str) -> str:
    if form == "target":
        row = min((row for row in rows if row["holds"] is not None), key=lambda row: bool(row["holds"]))
        unit = "" if row["unit"] in _BARE else f" {row['unit']}"
        return f"{row['target']:g}{unit}{'' if row['holds'] else ': missed'}"
    value = max(row["value"] for row in rows)
    return ("no", "yes")[int(value)] if form == "yes" else f"{value:{form}}"


def _of(run: Run) -> str:
    if not run["machine"]:
        return str(run["note"])
    machine, load = run["machine"], run["load"]
    took = f", took {run['seconds']} s" if "seconds" in run else ""
    return f"{machine['cores']} cores, load {load[0]}{': busy' if load[0] > BUSY else ''}{took}"


def tables(text: str, runs: Sequence[Run]) -> str:
    """The text with the numbers in it, and with the runs that these are of."""
    used: list[Run] = []

    def line_of(line: str) -> str:
        letters: set[str] = set()

        def cell(place: re.Match[str]) -> str:
            pairs = found(runs, *place.group(1, 2, 3))
            for run, _ in pairs:
                if run not in used:
                    used.append(run)
                letters.add(chr(ord("a") + used.index(run)))
            return _shown([row for _, row in pairs], place[4])

        return _CELL.sub(cell, line).replace("{runs}", ", ".join(sorted(letters)))

    written = "\n".join(map(line_of, text.split("\n")))
    list_ = [
        f"| {chr(ord('a') + at)} | `{run['command']}` | {run['date']} | `{run['commit']}` | {_of(run)} |"
        for at, run in enumerate(used)
    ]
    return written.replace("{all runs}", "\n".join(list_))


def with_tables(page: str, text: str, runs: Sequence[Run]) -> str:
    """The page with the tables as text and numbers are now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(text, runs)}\n{END}{rest.partition(END)[2]}"


def kept(text: str, runs: Sequence[Run]) -> list[Run]:
    """The runs with only the rows that the text has, oldest first."""
    shown = [
        (id(run), row["case"], row["metric"])
        for place in _CELL.finditer(text)
        for run, row in found(runs, *place.group(1, 2, 3))
    ]
    rows = [[row for row in run["rows"] if (id(run), row["case"], row["metric"]) in shown] for run in runs]
    return [run | {"rows": some} for run, some in zip(runs, rows, strict=True) if some]


def _as_text(runs: Sequence[Run]) -> Iterator[str]:
    """JSON with a line for each row, so that differences can be read."""
    for run in runs:
        head = json.dumps({key: value for key, value in run.items() if key != "rows"})
        rows = ",\n".join(f"  {json.dumps(row)}" for row in run["rows"])
        yield f'{head[:-1]}, "rows": [\n{rows}\n]}}'


def main(files: Sequence[str]) -> None:
    """Take the rows of some files, and write numbers and page."""
    runs = json.loads(NUMBERS.read_text())
    new = [json.loads(Path(file).read_text()) for file in files]
    runs = kept(TEXT.read_text(), [*runs, *sorted(new, key=lambda run: str(run["date"]))])
    NUMBERS.write_text("[\n" + ",\n".join(_as_text(runs)) + "\n]\n")
    PAGE.write_text(with_tables(PAGE.read_text(), TEXT.read_text(), runs))


if __name__ == "__main__":
    main(sys.argv[1:])
