"""What a night runs of a large grid: a part, drawn by a seed that is another one each day."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

#: Cases of one test; the others have their turn in other nights.
A_NIGHT = 3


def drawn(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Those of ``items`` that run: of each nightly test at most :data:`A_NIGHT` cases, all of any other."""
    tests = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("nightly"):
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    for name, cases in tests.items():
        if len(cases) > A_NIGHT:
            left_out |= {*cases} - {*random.Random(f"{seed} {name}").sample(cases, A_NIGHT)}
    return [item for item in items if item not in left_out]
