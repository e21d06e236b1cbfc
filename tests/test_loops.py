"""Loops as people write them lose workers in their first, second and last epoch, and end with the bits of stock."""

from __future__ import annotations

import pytest
from harness import Jobs

from shared_core.testing import Fault

#: Batches that each rank makes tops of in one epoch, by form; the end of a pass is one too.
TOPS = {}

FORMS = (
    "tqdm fresh own_generator generator enumerate islice zip map wrapper list nested turns left empty rounds stream "
    "bare_generator workers"
).split()


@pytest.mark.nightly
@pytest.mark.parametrize("top", range(1, 16))
@pytest.mark.parametrize("form", FORMS)
def test_every_form_at_every_top(form: str, top: int, jobs: Jobs) -> None:
    jobs.check("loops.py", faults=[Fault(top % 2, top, "bucket", "SIGKILL")], args=[form])
