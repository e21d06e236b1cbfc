"""How many optimizer updates a worker has gone through, and how many its state contains."""

from __future__ import annotations


class Count:
    """Counts updates. The caller holds the lock of the updates.

    Attributes:
        applied: updates that the program has gone through.
        ahead: updates that the state contains beyond those: of a replacement whose donor was ahead.
        recomputed: updates that this process has gone through more than once.
    """

    def __init__(self) -> None:
        self.applied = 0
        self.ahead = 0
        self.recomputed = 0
        self._highest = 0

    @property
    def state(self) -> int:
        return self.applied + self.ahead

    def begin(self, version: int, ahead: int = 0) -> None:
        """The program is where ``version`` updates have been made, with a state that contains ``ahead`` more."""
        self.applied, self.ahead = version, ahead

    def left_out(self) -> None:
        """The next update to be counted was left out, because the state contains it."""
        self.ahead -= 1

    def one(self) -> None:
        self.applied += 1
        if self.applied <= self._highest:
            self.recomputed += 1
        self._highest = max(self._highest, self.applied)

    def take_back(self) -> None:
        self.applied -= 1
        self._highest = self.applied
