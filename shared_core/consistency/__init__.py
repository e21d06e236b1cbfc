"""Decisions after a failure, as pure functions of plain data."""

from shared_core.consistency.cut import Cut, Offer, choose_cut
from shared_core.consistency.frontier import Channel, Done, Frontier, GroupFrontier, Top
from shared_core.consistency.let_in import let_in
from shared_core.consistency.plan import Plan, Transfer, decide

__all__ = [
    "Channel",
    "Cut",
    "Done",
    "Frontier",
    "GroupFrontier",
    "Offer",
    "Plan",
    "Top",
    "Transfer",
    "choose_cut",
    "decide",
    "let_in",
]
