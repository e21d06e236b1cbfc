"""Loops as people write them: in functions, generators and blocks, over two loaders, in passes within a batch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .grammar import Loop, Variable, inside

#: How a loop comes to its batches: its word, and how often it is drawn.
_DRAWN = {
    "for": 3,
    "while with next": 2,
    "while with a walrus": 1,
    "own generator": 2,
    "own iterator": 1,
    "islice of the loader": 1,
    "chain of loaders": 1,
    "zip of loaders": 2,
    "cycle of the loader": 1,
    "a second one by next": 0.3,
    "islice around": 0.15,
}
#: Only these are drawn where a framework makes the loader.
_ANYWHERE = frozenset({"for", "while with next", "while with a walrus", "own generator", "own iterator"})

_HELPERS = """
class Drawing:
    __slots__ = ("steps", "given")

    def __init__(self, steps):
        self.steps, self.given = iter(steps), 0

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self.steps)
        self.given += 1
        return item


class Within:
    depth = 0

    def __init__(self):
        self.entered, self.left = 0, []

    def __enter__(self):
        self.entered += 1
        return self

    def __exit__(self, kind, error, trace):
        self.left.append(self.entered)
        return False


@contextmanager
def counting(held):
    held["open"] = held.get("open", 0) + 1
    try:
        yield held
    finally:
        held["closed"] = held.get("closed", 0) + held["open"]


def drawn(steps):
    number = 0
    for i, batch in steps:
        number += 1
        yield i, batch, number


"""


class Shapes(Loop):
    """A loop of one of these shapes."""

    def __init__(self, draw: random.Random, plain: bool, framework: str) -> None:
        super().__init__(draw, plain, framework)
        weights = {word: weight for word, weight in _DRAWN.items() if framework == "torch" or word in _ANYWHERE}
        [self.shape] = draw.choices(list(weights), list(weights.values()))
        self.module = framework == "torch" and draw.random() < 0.25
        self.in_function = self.has("loop in a function", 0.4)
        self.blocks = self.has("blocks around", 0.4)
        self.parts.append(self.shape)

    def write(self) -> str:
        text = super().write()
        return _HELPERS + text

    def _at_module(self) -> bool:
        return self.module

    def _begun(self, variables: Sequence[Variable]) -> list[str]:
        second = self.draw.choice([4, 6])
        lines = [
            *super()._begun(variables),
            f"second = DataLoader(TensorDataset(data[:12]), batch_size={second}, shuffle=True)",
            "within, around, notes = Within(), {}, {}",
        ]
        if self.shape == "a second one by next":
            lines.append("again = cycle(data.split(5))")
        return lines

    def _end(self, variables: Sequence[Variable]) -> list[str]:
        lines = super()._end(variables)
        at = next(number for number, line in enumerate(lines) if line.startswith("hold("))
        lines[at] = lines[at].removesuffix(")") + ", within=within, around=around, notes=notes)"
        return lines

    def _epoch(self, variables: Sequence[Variable]) -> list[str]:
        lines = ["model.train()"]
        if self.data == "shuffled" and self.framework == "torch":
            lines.append("sampler.set_epoch(epoch)")
        source = "loader"
        if self.data == "made":
            source = "batches"
            lines += [*self.made(), "notes['order'] = notes.get('order', 0) + mine[0]"]
        loop = self._around(source, self._body(variables))
        if self.in_function:
            changed = [each.name for each in variables if each.where == each.name]
            word = "global" if self.module else "nonlocal"
            declared = [f"{word} {', '.join(changed)}"] if changed else []
            given = "epoch, batches" if self.data == "made" else "epoch"
            loop = [f"def one({given}):", *inside([*declared, *loop, "return epoch"]), f"notes['last'] = one({given})"]
        self.passes = self.epochs
        return [*lines, *loop, *self.after()]

    def _body(self, variables: Sequence[Variable]) -> list[str]:
        lines = self.step(variables)
        if self.has("loader within a batch", 0.35):
            lines += [
                "if i % 2 == 1:",
                "    with torch.no_grad():",
                "        for number, (z,) in enumerate(second):",
                "            v = v + net(z).mean().item() * (number + 1)",
                "            notes.setdefault('means', []).append(v)",
            ]
        if self.has("evaluation within a batch", 0.35):
            lines += [
                "if i == 2:",
                "    model.eval()",
                "    with torch.no_grad():",
                "        notes[epoch] = sum(net(z).square().sum().item() for (z,) in second)",
                "    model.train()",
            ]
        if self.has("try in a batch", 0.3):
            lines = ["try:", *inside(lines), "finally:", "    notes['tried'] = notes.get('tried', 0) + 1"]
        if self.has("block in a batch", 0.3):
            lines = ["with within as entered:", *inside([*lines, "notes['entered'] = entered.entered"])]
        return lines

    def _around(self, source: str, body: list[str]) -> list[str]:
        few = self.batches - 1
        steps = f"job.steps({source})"
        self.boundaries = self.batches + 1
        if self.shape == "while with next":
            head = ["try:", "    i, (x,) = next(steps)", "except StopIteration:", "    break"]
            loop = [f"steps = iter({steps})", "while True:", *inside([*head, *body])]
        elif self.shape == "while with a walrus":
            head = ["i, (x,) = item"]
            loop = [f"steps = iter({steps})", "while (item := next(steps, None)) is not None:", *inside([*head, *body])]
        elif self.shape == "own generator":
            loop = [f"for i, (x,), number in drawn({steps}):", *inside([*body, "notes['number'] = number"])]
        elif self.shape == "own iterator":
            loop = [f"for i, (x,) in Drawing({steps}):", *inside(body)]
        elif self.shape == "islice of the loader":
            self.batches, self.boundaries = few, few + 1
            loop = [f"for i, (x,) in job.steps(islice({source}, {few})):", *inside(body)]
        elif self.shape == "chain of loaders":
            loop = [f"for i, (x,) in job.steps(chain({source}, second)):", *inside(body)]
        elif self.shape == "zip of loaders":
            loop = [
                f"for i, ((x,), (y,)) in job.steps(zip({source}, second)):",
                *inside(["x = x + 0.01 * y.mean()", *body]),
            ]
            self.batches, self.boundaries = 2, 3
        elif self.shape == "cycle of the loader":
            more = self.batches + 2
            loop = [f"for i, (x,) in job.steps(islice(cycle({source}), {more})):", *inside(body)]
        elif self.shape == "a second one by next":
            loop = [f"for i, (x,) in {steps}:", *inside(["x = x + 0.01 * next(again).mean()", *body])]
        elif self.shape == "islice around":
            self.batches = few
            loop = [f"for i, (x,) in islice({steps}, {few}):", *inside(body)]
        else:
            loop = [f"for i, (x,) in {steps}:", *inside(body)]
        if self.blocks:
            loop = ["try:", "    with counting(around) as held:", *inside(inside(loop))]
            loop += ["finally:", "    notes['passes'] = notes.get('passes', 0) + 1"]
        return loop
