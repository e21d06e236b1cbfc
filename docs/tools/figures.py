"""The drawings of the documentation: ``python -m docs.tools.figures`` writes them to ``docs/images``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.tools.drawing import Drawing
from docs.tools.schedules import reroute

IMAGES = Path(__file__).parents[1] / "images"


def failure() -> str:
    """One failure as a sequence diagram: the launcher and three workers."""
    draw = Drawing(980, 676, "One failure: what the launcher and the workers say to each other")
    lanes = {"launcher": 110, "failed": 350, "survivor": 590, "replacement": 840}
    heads = {
        "launcher": ("launcher", "swiftrun, one a machine"),
        "failed": ("worker, rank 1", "is killed in batch 7"),
        "survivor": ("workers, ranks 0, 2, 3", "survive"),
        "replacement": ("standby", "becomes rank 1's replacement"),
    }
    for name, x in lanes.items():
        draw.box(x - 92, 14, 184, 46, "blue" if name == "launcher" else "panel")
        draw.text(x, 34, heads[name][0], anchor="middle", bold=True)
        draw.text(x, 51, heads[name][1], size=11.5, colour="soft", anchor="middle")
    for name, x in lanes.items():
        draw.line(x, 60, x, 130 if name == "failed" else 600, dashed=name == "replacement")

    def note(name: str, y: float, *lines: str, fill: str = "panel", width: float = 208) -> None:
        draw.box(lanes[name] - width / 2, y, width, 12 + 16 * len(lines), fill)
        for at, line in enumerate(lines):
            draw.text(lanes[name], y + 18 + 16 * at, line, size=12, anchor="middle")

    def tell(source: str, target: str, y: float, words: str, colour: str = "edge", *, up: float = 6) -> None:
        here, there = lanes[source], lanes[target]
        step = 5 if there > here else -5
        draw.arrow(here + step, y, there - step, y, colour)
        draw.text((here + there) / 2, y - up, words, size=12, anchor="middle")

    note("survivor", 76, "backward of batch 7,", "then wait in an all-reduce")
    draw.cross(350, 140)
    draw.text(364, 134, "SIGKILL", size=12, colour="red", bold=True)
    tell("failed", "launcher", 166, "its process has ended", "red")
    note("launcher", 182, "judges the loss, writes", "generation 1 to the ledger")
    tell("launcher", "survivor", 256, "generation 1: rank 1 has failed")
    note("survivor", 268, "cut their connections;", "the all-reduce stays pending")
    tell("launcher", "replacement", 340, "fork: be rank 1")
    note("replacement", 352, "runs the script up to", "its training loop")
    tell("survivor", "replacement", 424, "", "soft")
    tell("replacement", "survivor", 424, "each posts what it has finished", "soft")
    note("survivor", 438, "one computes the plan:", "who serves what to whom")
    tell("survivor", "replacement", 512, "state and log", "good")
    note("replacement", 524, "runs batch 7 again;", "answers come from the log")
    draw.box(470, 600, 490, 40, "green", edge="good")
    draw.text(715, 625, "generation 1 is live: the all-reduce ends at all four", anchor="middle", bold=True)
    draw.arrow(470, 620, 206, 620, "edge")
    draw.text(338, 613, "recovered", size=12, anchor="middle")
    draw.box(16, 600, 188, 40)
    draw.text(110, 625, "prints: rank 1 is back", size=12, anchor="middle")
    draw.text(
        715, 662, "at the next step boundary all replicas compare checksums", size=12, anchor="middle", colour="soft"
    )
    return draw.svg()


def message_log() -> str:
    """What is kept of two batches, and what a replacement is served from it."""
    draw = Drawing(980, 440, "The message log: a replacement runs its batch again and is served logged results")
    left, mid, end = 150, 520, 950
    for x, name in ((left, "step boundary 17"), (mid + 230, "step boundary 18")):
        draw.line(x, 40, x, 300, dashed=True)
        draw.text(x, 32, name, size=12, colour="soft", anchor="middle")
    rows = {"rank 0": 60, "rank 1": 108, "rank 2": 156, "replacement": 234}
    for name, y in rows.items():
        draw.text(left - 20, y + 20, name, anchor="end", bold=True)
    for name in ("rank 0", "rank 1"):
        y = rows[name]
        draw.box(left, y, 90, 30, "blue")
        draw.box(left + 94, y, 70, 30, "teal")
        draw.box(left + 168, y, 74, 30, "sand")
        draw.box(left + 246, y, 236, 30, "none", dashed=True)
        draw.box(left + 486, y, 50, 30, "sand")
        draw.box(left + 540, y, 56, 30, "pink")
        for x, word in ((45, "forward"), (129, "backward"), (205, "bucket 1"), (511, "2"), (568, "update")):
            draw.text(left + x, y + 20, word, size=12, anchor="middle")
        draw.text(left + 364, y + 20, "waits in bucket 2: no exception", size=12, colour="soft", anchor="middle")
        draw.line(left + 600, y + 15, end, y + 15, thick=2)
    y = rows["rank 2"]
    draw.box(left, y, 90, 30, "blue")
    draw.box(left + 94, y, 70, 30, "teal")
    draw.box(left + 168, y, 74, 30, "sand")
    for x, word in ((45, "forward"), (129, "backward"), (205, "bucket 1")):
        draw.text(left + x, y + 20, word, size=12, anchor="middle")
    draw.cross(left + 258, y + 15)
    draw.text(left + 274, y + 20, "killed", size=12, colour="red", bold=True)
    y = rows["replacement"]
    draw.box(left + 278, y, 62, 30, "blue")
    draw.box(left + 344, y, 66, 30, "teal")
    draw.box(left + 414, y, 68, 30, "green", edge="good", thick=1.6)
    draw.box(left + 486, y, 50, 30, "sand")
    draw.box(left + 540, y, 56, 30, "pink")
    for x, word in ((309, "forward"), (377, "backward"), (448, "bucket 1"), (511, "2"), (568, "update")):
        draw.text(left + x, y + 20, word, size=12, anchor="middle")
    draw.line(left + 600, y + 15, end, y + 15, thick=2)
    draw.text(left + 262, y + 20, "batch 17 again", size=12, colour="soft", anchor="end")
    draw.box(left - 8, 322, 480, 96, "panel")
    draw.text(left + 6, 344, "message log of ranks 0 and 1", bold=True)
    for at, (word, fill) in enumerate(
        (("batch 16: 1", "sand"), ("batch 16: 2", "sand"), ("batch 17: 1", "green"), ("batch 17: 2", "none"))
    ):
        draw.box(
            left + 6 + 114 * at, 358, 106, 28, fill, dashed=fill == "none", edge="good" if fill == "green" else "line"
        )
        draw.text(left + 59 + 114 * at, 377, word, size=12, anchor="middle")
    draw.text(
        left + 6, 407, "reduced buckets of the last two batches; bucket 2 is not finished yet", size=12, colour="soft"
    )
    draw.arrow(left + 340, 356, left + 440, 268, "good", thick=2)
    draw.text(left + 368, 306, "served: the same bits", size=12, colour="good", anchor="end")
    draw.line(left + 511, 266, left + 511, 292, "soft")
    draw.text(left + 500, 308, "live again: bucket 2 is reduced", size=12, colour="soft")
    draw.text(left + 500, 325, "by all three, replacement included", size=12, colour="soft")
    return draw.svg()


def architecture() -> str:
    """The two processes and the protocol between them."""
    draw = Drawing(980, 520, "Two processes and one protocol")
    draw.box(20, 16, 620, 62, "panel")
    draw.text(36, 52, "the user's script", bold=True)
    for x, width, name in (
        (180, 136, "lightning_swift"),
        (326, 142, "accelerate_swift"),
        (478, 146, "attach, steps, ..."),
    ):
        draw.box(x, 30, width, 34, "blue")
        draw.text(x + width / 2, 52, name, size=12.5, anchor="middle", mono=True)
    draw.box(20, 116, 620, 296, "none")
    draw.text(36, 140, "worker/", bold=True, mono=True)
    draw.text(104, 140, "the training process", colour="soft")
    for x in (248, 397, 551):
        draw.arrow(x, 66, x, 154)
    parts = (
        (40, 156, 580, 34, "job.py, loop.py, checkpointer.py", "what every loop calls"),
        (40, 206, 280, 42, "comm/", "the backend swift, over gloo"),
        (340, 206, 280, 42, "messages/", "the message log"),
        (40, 264, 280, 42, "state/", "replicated and rank-local state"),
        (340, 264, 280, 42, "recovery/", "generations, transfer, replay"),
        (40, 322, 280, 42, "checkpoints/", "snapshots"),
        (340, 322, 280, 42, "pipeline/, reroute/", "DeepSpeed; plans"),
    )
    for x, y, width, height, name, what in parts:
        draw.box(x, y, width, height, "green" if y > 160 else "blue")
        draw.text(x + 12, y + height / 2 + 4, name, size=12, mono=True)
        draw.text(x + width - 12, y + height / 2 + 4, what, size=11.5, colour="soft", anchor="end")
    draw.text(
        36, 394, "one process a rank; frameworks see the same process group for the whole job", size=12, colour="soft"
    )
    draw.box(720, 116, 240, 296, "none")
    draw.text(736, 140, "launcher/", bold=True, mono=True)
    draw.text(820, 140, "swiftrun", colour="soft")
    for at, (name, what) in enumerate(
        (
            ("agent", "one loop"),
            ("workers, standby", "processes"),
            ("losses, ledger", "what happened"),
            ("rendezvous, lease", "machines"),
            ("mirror", "copies of state"),
        )
    ):
        draw.box(736, 156 + 46 * at, 208, 36, "sand")
        draw.text(746, 178 + 46 * at, name, size=11, mono=True)
        draw.text(934, 178 + 46 * at, what, size=11, colour="soft", anchor="end")
    draw.text(736, 400, "one agent a machine", size=12, colour="soft")
    draw.box(20, 450, 940, 54, "pink")
    draw.text(36, 473, "protocol/", bold=True, mono=True)
    draw.text(36, 491, "plain data and pure decisions", size=12, colour="soft")
    draw.text(470, 482, "store keys, records, phases, the plan of a recovery", size=12.5, anchor="middle")
    draw.text(944, 482, "no torch, thread or socket", size=12, colour="soft", anchor="end")
    draw.arrow(330, 448, 330, 414)
    draw.arrow(330, 414, 330, 448)
    draw.arrow(840, 448, 840, 414)
    draw.arrow(840, 414, 840, 448)
    draw.arrow(640, 285, 718, 285, "soft", dashed=True)
    draw.text(680, 262, "publications", size=10.5, colour="soft", anchor="middle")
    draw.text(680, 276, "in memory", size=10.5, colour="soft", anchor="middle")
    return draw.svg()


FIGURES: dict[str, Callable[[], str]] = {
    "architecture.svg": architecture,
    "failure.svg": failure,
    "message_log.svg": message_log,
    "reroute.svg": reroute,
}

if __name__ == "__main__":
    for name, figure in FIGURES.items():
        (IMAGES / name).write_text(figure())
