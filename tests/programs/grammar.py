"""Writes random scripts: the same seed gives the same script."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import dedent, indent
from typing import Any

from .state import KINDS, PRELUDE, Kind

FRAMEWORKS = ("torch", "torch", "torch", "torch", "lightning", "lightning", "fabric", "accelerate")


@dataclass(frozen=True)
class Program:
    """A script.

    Attributes:
        seed: which gives it.
        framework: what it trains with.
        parts: words for what is in it.
        stock: the script without this product.
        swift: the same with it.
        passes: how many training passes it makes.
        batches: of each.
        boundaries: step boundaries of each.
    """

    seed: int
    framework: str
    parts: tuple[str, ...]
    stock: str
    swift: str
    passes: int
    batches: int
    boundaries: int


@dataclass(frozen=True)
class Variable:
    """A variable of a program: ``where`` is how it is reached, ``first`` its first value if it is plain."""

    name: str
    where: str
    kind: Kind
    net: str = "net"

    @property
    def change(self) -> list[str]:
        return [line.format(x=self.where, net=self.net) for line in self.kind.change]

    @property
    def number(self) -> str:
        return "(" + self.kind.number.format(x=self.where, net=self.net) + ")"

    @property
    def first(self) -> str:
        return f"{self.where} = {self.kind.first.format(net=self.net)}"


def write(seed: int, *, plain: bool = True) -> Program:
    """The program of a seed.

    Args:
        seed: any number.
        plain: state may be in plain variables; otherwise all that can be is registered, and nothing else is used.
    """
    from .shapes import Shapes

    draw = random.Random(seed)
    framework = draw.choice(FRAMEWORKS)
    if framework == "lightning":
        writer: Any = _Lightning(draw, plain)
    else:
        writer = (Shapes if draw.random() < 0.5 else Loop)(draw, plain, framework)
    body = writer.write()
    texts = {}
    for stock in (True, False):
        head, setup = writer.ways_in(stock)
        texts[stock] = PRELUDE + dedent(head) + "\n\n" + _set_up(body, dedent(setup))
    parts = (framework, *writer.parts)
    return Program(seed, framework, parts, texts[True], texts[False], writer.passes, writer.batches, writer.boundaries)


def _set_up(body: str, setup: str) -> str:
    """The lines in the place of SETUP, as far in as that is."""
    found = re.search(r"(?m)^( *)SETUP\n", body)
    assert found is not None
    return body.replace(found[0], indent(setup, found[1]))


class _Writer:
    """What all kinds of scripts share.

    Attributes:
        parts: words for what has been drawn.
        passes: how many training passes there are.
        batches: of each.
        boundaries: step boundaries of each.
    """

    def __init__(self, draw: random.Random, plain: bool) -> None:
        self.draw, self.plain = draw, plain
        self.parts: list[str] = []
        self.passes = self.epochs = draw.choice([2, 3])
        self.batches = self.boundaries = 0
        self.size = draw.choice([24, 28, 36])

    def has(self, word: str, chance: float) -> bool:
        found = self.draw.random() < chance
        if found:
            self.parts.append(word)
        return found

    def kinds(self, count: int, allowed: Sequence[str]) -> list[str]:
        return self.draw.sample(list(allowed), min(count, len(allowed)))

    def network(self, name: str) -> str:
        middle = []
        if self.has("norm", 0.3):
            middle.append("nn.BatchNorm1d(6)")
        middle.append("nn.Tanh()")
        if self.has("dropout", 0.3):
            middle.append("nn.Dropout(0.2)")
        return f"{name} = nn.Sequential(nn.Linear(4, 6), {', '.join(middle)}, nn.Linear(6, 1))"

    def optimizer(self, parameters: str) -> str:
        kind = self.draw.choice(["SGD({}, lr=0.05, momentum=0.9)", "AdamW({}, lr=0.01)", "RMSprop({}, lr=0.005)"])
        return "torch.optim." + kind.format(parameters)

    def noise(self) -> str:
        found = ["0.0 * x"]
        if self.has("noise", 0.4):
            found.append("0.1 * torch.randn(x.shape)")
        if self.has("numpy", 0.2):
            found.append("0.1 * float(np.random.rand())")
        if self.has("random", 0.2):
            found.append("0.1 * random.random()")
        return " + ".join(found)

    def used(self, variables: Sequence[Variable]) -> str:
        """What the loss is multiplied with."""
        used = [each for each in variables if self.draw.random() < 0.5]
        self.parts.append(f"{len(used)} of {len(variables)} used")
        return " ".join(["1.0", *(f"+ 1e-3 * {each.number}" for each in used)])


class Loop(_Writer):
    """A loop that the script writes: plain PyTorch, Fabric or Accelerate."""

    def __init__(self, draw: random.Random, plain: bool, framework: str) -> None:
        super().__init__(draw, plain)
        self.framework = framework

    def ways_in(self, stock: bool) -> tuple[str, str]:
        """Lines before the program, and at its beginning, with this product or without."""
        job = """
        class Stock:
            def epochs(self, count):
                return range(count)

            def steps(self, loader):
                return enumerate(loader)

            def register(self, *objects, **values):
                return SimpleNamespace(**values)

        def attach(*objects):
            return Stock()
        """
        if self.framework == "torch":
            if stock:
                return job, 'dist.init_process_group("gloo")\n'
            return "from shared_core import attach, install\n", 'install()\ndist.init_process_group("gloo")\n'
        if self.framework == "fabric":
            head = "from lightning.fabric import Fabric\n"
            head += dedent(job) if stock else "from lightning_swift import attach\n"
            strategy = "ddp" if stock else "swift_ddp"
            return head, f'fabric = Fabric(accelerator="cpu", devices=2, strategy="{strategy}")\nfabric.launch()\n'
        head = "from accelerate import Accelerator\n"
        if stock:
            return head + dedent(job), "plugin = Stock()\naccelerator = Accelerator(cpu=True)\n"
        return (
            head + "from accelerate_swift import SwiftPlugin\n",
            "plugin = SwiftPlugin()\naccelerator = Accelerator(cpu=True, kwargs_handlers=[plugin])\n",
        )

    def write(self) -> str:
        self.second = self.framework == "torch" and self.has("two networks", 0.25)
        self.data = self.draw.choice(["shuffled", "stream", "made"] if self.framework == "torch" else ["shuffled"])
        self.parts.append(self.data)
        variables = self._variables()
        lines = [
            "SETUP",
            "torch.manual_seed(3)",
            f"data = torch.randn({self.size}, 4, generator=torch.Generator().manual_seed(5))",
            *self._trained(),
            "torch.manual_seed(RANK)",
            "np.random.seed(RANK)",
            "random.seed(RANK)",
            *self._begun(variables),
            f"for epoch in job.epochs({self.epochs}):",
            *inside(self._epoch(variables)),
            *self._end(variables),
        ]
        if self._at_module():
            return "\n".join([*self._streams(), *lines, ""])
        return "\n".join(
            [*self._streams(), "def main():", *inside(lines), "", "", 'if __name__ == "__main__":', "    main()", ""]
        )

    def _at_module(self) -> bool:
        return self.framework == "torch" and self.has("variables of the module", 0.25)

    # -- before the loop ------------------------------------------------------------------------------------

    def _variables(self) -> list[Variable]:
        """Some registered by name, some plain."""
        registers = [name for name, kind in KINDS.items() if kind.registers]
        names = self.kinds(self.draw.randint(2, 5), list(KINDS) if self.plain else registers)
        found = []
        for name in names:
            kind = KINDS[name]
            registered = kind.registers and (not self.plain or self.draw.random() < 0.3)
            found.append(Variable(name, f"kept.{name}" if registered else name, kind))
            self.parts.append(f"{name}{' registered' if registered else ''}")
        return found

    def _streams(self) -> list[str]:
        if self.data != "stream":
            return []
        return [
            "class Stream(IterableDataset):",
            "    def __init__(self, data):",
            "        self.data = data",
            "",
            "    def __iter__(self):",
            "        order = list(range(RANK, len(self.data), 2))",
            "        random.shuffle(order)",
            "        for index in order:",
            "            yield (self.data[index],)",
            "",
            "",
        ]

    def _trained(self) -> list[str]:
        lines = [self.network("net"), "optimizer = " + self.optimizer("net.parameters()")]
        batch = self.draw.choice([3, 4])
        self.batches = -(-self.size // 2 // batch)
        if self.framework == "torch":
            lines.append("model = nn.parallel.DistributedDataParallel(net)")
            if self.second:
                lines += [
                    "critic = nn.Linear(4, 1)",
                    "critic_model = nn.parallel.DistributedDataParallel(critic)",
                    "critic_optimizer = " + self.optimizer("critic.parameters()"),
                ]
            if self.data == "shuffled":
                lines += [
                    "sampler = DistributedSampler(TensorDataset(data), shuffle=True)",
                    f"loader = DataLoader(TensorDataset(data), batch_size={batch}, sampler=sampler)",
                ]
            elif self.data == "stream":
                lines.append(f"loader = DataLoader(Stream(data), batch_size={batch})")
            else:
                lines += ["order = list(range(len(data)))", "deck = random.Random(11)"]
            self.batch = batch
        else:
            lines.append(f"loader = DataLoader(TensorDataset(data), batch_size={batch}, shuffle=True)")
        self.schedules = self.has("schedule", 0.3)
        if self.schedules:
            lines.append("schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)")
        self.other = self.has("nested pass", 0.25)
        if self.framework == "fabric":
            lines += ["model, optimizer = fabric.setup(net, optimizer)", "loader = fabric.setup_dataloaders(loader)"]
        elif self.framework == "accelerate":
            lines.append("model, optimizer, loader = accelerator.prepare(net, optimizer, loader)")
        return lines

    def _begun(self, variables: Sequence[Variable]) -> list[str]:
        attached = ["model", "optimizer"]
        if self.second:
            attached += ["critic_model", "critic_optimizer"]
        if self.schedules:
            attached.append("schedule")
        registered = [
            f"{each.name}={each.kind.first.format(net=each.net)}" for each in variables if each.where != each.name
        ]
        counted = ["count_epochs=0", "number=0", "both=0.0", *registered]
        lines = []
        if self.framework == "accelerate":
            lines += ["job = plugin"] + (["plugin.register(schedule)"] if self.schedules else [])
        else:
            lines.append(f"job = attach({', '.join(attached)})")
        lines.append(f"kept = job.register({', '.join(counted)})")
        if self.data == "made" and not self.plain:
            lines.append("kept_deck = job.register(order=order, deck=deck.getstate())")
        return lines + [each.first for each in variables if each.where == each.name]

    # -- the loop -------------------------------------------------------------------------------------------

    def _epoch(self, variables: Sequence[Variable]) -> list[str]:
        lines = ["model.train()"]
        if self.data == "shuffled" and self.framework == "torch":
            lines.append("sampler.set_epoch(epoch)")
        source, passes = "loader", 1
        self.boundaries = self.batches + (self.framework in ("torch", "fabric"))  # the end of a pass is one there
        if self.data == "made":
            lines += self.made()
            source = "batches"
        loop = self.step(variables)
        if self.has("break at a count", 0.35):
            counter = "number" if self.plain and self.draw.random() < 0.7 else "kept.number"
            self.parts.append(counter)
            lines.append(f"{counter} = 0")
            self.boundaries = self.batches = self.batches - 1
            loop += [f"{counter} += 1", f"if {counter} == {self.batches}:", "    break"]
        elif self.has("two passes", 0.15):
            passes = 2
        head = f"for i, (x,) in job.steps({source}):"
        if self.has("enumerated", 0.2):
            head = f"for i, (_, (x,)) in enumerate(job.steps({source})):"
        elif self.has("zipped", 0.1):
            head = f"for ((_, (x,)), i) in zip(job.steps({source}), range(1, 99)):"
        for _ in range(passes):
            lines += [head, *inside(loop)]
        self.passes = self.epochs * passes
        return lines + self.after()

    def made(self) -> list[str]:
        """Batches of this epoch, of data that the script orders itself."""
        lines = [
            "deck.setstate(kept_deck.deck)",
            "deck.shuffle(kept_deck.order)",
            "kept_deck.deck = deck.getstate()",
            "order = kept_deck.order",
        ]
        return [
            *(["deck.shuffle(order)"] if self.plain else lines),
            "mine = order[RANK::2]",
            f"batches = [(data[mine[at : at + {self.batch}]],) for at in range(0, len(mine), {self.batch})]",
        ]

    def step(self, variables: Sequence[Variable]) -> list[str]:
        """What is done with a batch."""
        used = self.used(variables)
        lines = [f"x = x + {self.noise()}", f"loss = model(x).square().mean() * ({used})"]
        backward = {"torch": "loss.backward()", "fabric": "fabric.backward(loss)"}
        if self.framework == "torch" and not self.second and self.has("accumulate", 0.2):
            lines += [
                "if i % 2 == 0:",
                "    with model.no_sync():",
                "        loss.backward()",
                "else:",
                "    loss.backward()",
                "    optimizer.step()",
                "    optimizer.zero_grad()",
            ]
        else:
            lines += ["optimizer.zero_grad()", backward.get(self.framework, "accelerator.backward(loss)")]
            if self.framework == "torch" and self.has("clip", 0.3):
                lines.append("nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
            lines.append("optimizer.step()")
        if self.second:
            lines += [
                "critic_optimizer.zero_grad()",
                "(critic_model(x) - net(x).detach()).square().mean().backward()",
                "critic_optimizer.step()",
            ]
        if self.schedules:
            lines.append("schedule.step()")
        lines.append("v = loss.item()")
        for each in variables:
            lines += each.change
        if self.other:
            inner = "_, y in job.steps(data.split(12))" if self.has("in steps", 0.4) else "y in data.split(12)"
            lines += [
                "if i == 1:",
                "    with torch.no_grad():",
                f"        for {inner}:",
                "            v = v + net(y).mean().item()",
            ]
        if self.has("collective", 0.3):
            lines += ["both = torch.tensor([v])", "dist.all_reduce(both)", "kept.both += both.item()"]
        if self.has("continue", 0.15):
            lines.insert(0, "if i % 3 == 2 and epoch:")
            lines.insert(1, "    continue")
        return lines

    def after(self) -> list[str]:
        """What is done after an epoch."""
        lines = ["kept.count_epochs += 1", "optimizer.zero_grad()"]
        if self.has("evaluation", 0.5):
            lines += [
                "model.eval()",
                "with torch.no_grad():",
                "    score = net(data).square().mean()",
                "dist.all_reduce(score)",
                'say(f"r{RANK} {epoch} {score.item():.9g}")',
            ]
        return lines

    def _end(self, variables: Sequence[Variable]) -> list[str]:
        held = [f"{each.name}={each.where}" for each in variables]
        held += ["parameters=list(net.parameters())", "buffers=list(net.buffers())"]
        held += ["optimizer=optimizer.state_dict()", "epochs=kept.count_epochs", "both=kept.both"]
        if self.second:
            held += ["critic=list(critic.parameters())", "critic_optimizer=critic_optimizer.state_dict()"]
        if self.schedules:
            held.append("schedule=schedule.last_epoch")
        if self.data == "made":
            held += ["order=order", "deck=deck"]
        return [
            f"hold({', '.join(held)})",
            'say(f"r{RANK} ends")',
            "dist.barrier()",
            "dist.destroy_process_group()",
        ]


class _Lightning(_Writer):
    """A module, perhaps a callback, and a Trainer."""

    def ways_in(self, stock: bool) -> tuple[str, str]:
        """As :meth:`Loop.ways_in`."""
        head = "import lightning.pytorch as pl\n"
        return (
            (head, 'strategy = "ddp"\n') if stock else (head + "import lightning_swift\n", 'strategy = "swift_ddp"\n')
        )

    def write(self) -> str:
        batch = self.draw.choice([3, 4])
        self.boundaries = self.batches = -(-self.size // 2 // batch)
        attributes = [name for name, kind in KINDS.items() if kind.attribute and (self.plain or kind.registers)]
        names = self.kinds(self.draw.randint(3, 6), attributes)
        self.parts += names
        share = 0.4 if self.has("callback", 0.5) else 0.0
        given = [name for name in names[1:] if KINDS[name].on_callback and self.draw.random() < share]
        mine = [Variable(name, f"self.{name}", KINDS[name], "self.net") for name in names if name not in given]
        theirs = [Variable(name, f"self.{name}", KINDS[name]) for name in given]
        validates, schedules = self.has("validation", 0.4), self.has("schedule", 0.3)
        step = [
            "(x,) = batch",
            f"x = x + {self.noise()}",
            f"loss = self.net(x).square().mean() * ({self.used(mine)})",
            "v, i = loss.item(), batch_idx",
            *(line for each in mine for line in each.change),
        ]
        if self.has("logged", 0.3):
            step.append('self.log("loss", loss, on_epoch=True, sync_dist=True)')
        module = [
            "def __init__(self):",
            *inside(["super().__init__()", "self." + self.network("net"), *(each.first for each in mine)]),
            "",
            "def training_step(self, batch, batch_idx):",
            *inside([*step, "return loss"]),
            "",
            "def configure_optimizers(self):",
            f"    optimizer = {self.optimizer('self.parameters()')}",
            "    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]"
            if schedules
            else "    return optimizer",
        ]
        if validates:
            module += [
                "",
                "def validation_step(self, batch, batch_idx):",
                '    self.log("score", self.net(batch[0]).square().mean(), sync_dist=True)',
            ]
        callback = [
            "def __init__(self):",
            *inside([each.first for each in theirs] or ["pass"]),
            "",
            "def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):",
            *inside(['v, i = outputs["loss"].item(), batch_idx', *(line for each in theirs for line in each.change)]),
        ]
        held = [f"{each.name}=module.{each.name}" for each in mine]
        held += [f"{each.name}=callback.{each.name}" for each in theirs]
        held += ["parameters=list(module.parameters())", "buffers=list(module.buffers())"]
        held += ["optimizer=trainer.optimizers[0].state_dict()", "steps=trainer.global_step"]
        held.append("metrics={key: float(value) for key, value in trainer.callback_metrics.items()}")
        main = [
            "SETUP",
            "torch.manual_seed(3)",
            f"data = torch.randn({self.size}, 4, generator=torch.Generator().manual_seed(5))",
            "module, callback = Module(), Callback()",
            "torch.manual_seed(RANK)",
            "np.random.seed(RANK)",
            "random.seed(RANK)",
            "trainer = pl.Trainer(",
            '    accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,',
            "    enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],",
            f"    max_epochs={self.epochs},",
            ")",
            f"loader = DataLoader(TensorDataset(data), batch_size={batch}, shuffle=True)",
            "held_out = DataLoader(TensorDataset(data[:12]), batch_size=4)" if validates else "held_out = None",
            "trainer.fit(module, loader, held_out)",
            f"hold({', '.join(held)})",
            'say(f"r{RANK} ends")',
        ]
        return "\n".join(
            [
                "class Module(pl.LightningModule):",
                *inside(module),
                "",
                "",
                "class Callback(pl.Callback):",
                *inside(callback),
                "",
                "",
                "def main():",
                *inside(main),
                "",
                "",
                'if __name__ == "__main__":',
                "    main()",
                "",
            ]
        )


def inside(lines: Sequence[str]) -> list[str]:
    """One level further in."""
    return [f"    {line}" if line else line for line in lines]
