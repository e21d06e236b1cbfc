"""Titles of processes: as much as fits in the room of a command line. That ``ps`` shows them is in test_swiftrun.py."""

from __future__ import annotations

import pytest

from shared_core.system.process import fitting


@pytest.mark.parametrize(
    ("target", "args", "room", "title"),
    [
        ("", [], 99, "swift rank 2"),
        ("train.py", [], 99, "swift rank 2: train.py"),
        ("/home/me/train.py", ["--lr", "a b"], 99, "swift rank 2: /home/me/train.py --lr a b"),
        ("/home/me/train.py", ["--lr", "0.1"], 36, "swift rank 2: /home/me/train.py --lr"),
        ("/home/me/train.py", ["--lr", "0.1"], 30, "swift rank 2: train.py --lr 0."),
        ("/home/me/train.py", [], 8, "swift ra"),
    ],
)
def test_what_fits(target: str, args: list[str], room: int, title: str) -> None:
    assert fitting("swift rank 2", target, args, room) == title.encode()
