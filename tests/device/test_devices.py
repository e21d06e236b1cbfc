"""What is refused on a device, in one process on the simulated one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared_core.devices import apart, check
from shared_core.errors import Unsupported

HERE = Path(__file__).parent


def test_a_device_is_refused_where_nobody_allows_it() -> None:
    with pytest.raises(Unsupported, match=r"the model is on cuda:0, .*device\.experimental=true"):
        check(torch.device("cuda", 0), "the model", allowed=False)
    for allowed in ("cpu", "meta"):
        check(torch.device(allowed), "the model", allowed=False)
    check(torch.device("cuda", 0), "the model", allowed=True)
    assert not apart([torch.zeros(1), torch.zeros(1, device="meta")])
