"""An iteration of a pipeline before and after a loss, drawn from the planner's own plans."""

from __future__ import annotations

from docs.tools.drawing import Drawing
from shared_core.schedule.planner import plan
from shared_core.schedule.schedule import Kind, PlannedWorker, Topology
from shared_core.schedule.timing import EQUAL_SLOTS, Timeline, simulate

#: The example of docs/planner.md: ``swiftctl lab plan --dp 3 --pp 4 --micro-batches 6 --failed 1:2``.
TOPOLOGY = Topology(pipelines=3, stages=4, micro_batches=6)
FAILED = PlannedWorker(1, 2)
_FILL = {Kind.F: "blue", Kind.I: "green", Kind.W: "sand", Kind.B: "teal", Kind.OPT: "pink"}
_WORDS = {
    Kind.F: "forward (F)",
    Kind.B: "backward (B)",
    Kind.I: "backward, input (I)",
    Kind.W: "backward, weights (W)",
    Kind.OPT: "optimizer",
}
_LEFT, _SLOT, _ROW = 70, 27.2, 20


def reroute() -> str:
    """Both schedules, one above the other."""
    before, after = plan(TOPOLOGY), plan(TOPOLOGY, [FAILED])
    draw = Drawing(980, 690, "An iteration of three pipelines of four stages, before and after a loss")
    _panel(draw, 34, f"without a failure: {before.period:g} slots", simulate(before.schedule, EQUAL_SLOTS), set())
    away = simulate(after.schedule, EQUAL_SLOTS, staggered=True)
    _panel(
        draw, 344, f"{FAILED} has failed: still {after.period:g} slots from one iteration to the next", away, {FAILED}
    )
    x = float(_LEFT)
    for kind, words in _WORDS.items():
        draw.box(x, 660, 16, 14, _FILL[kind], round_=2)
        draw.text(x + 22, 672, words, size=12)
        x += 36 + 7 * len(words)
    draw.box(x, 660, 16, 14, "paper", edge="edge", thick=2.4, round_=2)
    draw.text(x + 22, 672, "computed for the failed worker", size=12)
    return draw.svg()


def _panel(draw: Drawing, top: float, title: str, timeline: Timeline, failed: set[PlannedWorker]) -> None:
    draw.text(_LEFT, top - 10, title, bold=True)
    for at, worker in enumerate(TOPOLOGY.workers()):
        y = top + _ROW * at + 10 * worker.pipeline
        draw.text(_LEFT - 10, y + 14, str(worker), size=11, mono=True, anchor="end")
        if worker in failed:
            draw.line(_LEFT, y + 9, _LEFT + 33 * _SLOT, y + 9, "red", dashed=True)
            draw.text(_LEFT + 6, y + 6, "failed", size=10.5, colour="red")
            continue
        for action, start, end in timeline.rows[worker]:
            foreign = action.kind is not Kind.OPT and action.pipeline != worker.pipeline
            x, width = _LEFT + start * _SLOT, (end - start) * _SLOT
            if foreign:
                draw.box(x + 1.4, y + 1.4, width - 2.8, 15.2, _FILL[action.kind], edge="edge", thick=2.4, round_=2)
            else:
                draw.box(x + 0.5, y, width - 1, 18, _FILL[action.kind], round_=2)
            label = "OPT" if action.kind is Kind.OPT else f"{action.kind.name}{action.micro_batch}"
            draw.text(x + width / 2, y + 13, label, size=10, anchor="middle", mono=True)
