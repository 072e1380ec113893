"""Training loops of frameworks, each with a plain counter of its own, for the test of step counting.

    python counting_job.py OUT SCENARIO...

Every scenario trains twice with the same seed: watched, and then as it is. `Reference` notes the input and the moment
of every training call of the module `fc`, as the framework itself tells it. OUT gets them with the losses of both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import capd_client
from capd_client.integrations.counters import frameworks, patches

Call = tuple[int, int, int]  # iteration, micro-batch, call
Where = Callable[[], tuple[int, int]]


class Net(nn.Module):
    """fc, and a forward that returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.fc.register_forward_pre_hook(lambda module, args: module.reference(args[0]))
        self.fc.reference = Reference()

    @property
    def reference(self) -> Reference:
        return self.fc.reference  # type: ignore[return-value]

    def forward(self, x: Tensor, **_: Any) -> dict[str, Tensor]:
        return {"loss": (self.fc(x) * x).square().mean()}


class Reference:
    """The calls of one module and where its loop says it is; a new micro-batch is where `where` says a new one."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, Tensor]] = []
        self.where: Where = lambda: (0, 0)

    def __call__(self, x: Tensor) -> None:
        if torch.is_grad_enabled():
            at = self.where()
            repeated = sum(call[:2] == at for call, _ in self.calls)
            self.calls.append(((*at, repeated), x.detach().clone()))


class CountRepeats:
    """The n-th time in a row that a number is seen: what a loop's author would write for micro-batches."""

    def __init__(self) -> None:
        self._last = -1
        self._count = 0

    def __call__(self, number: int) -> int:
        self._count = self._count + 1 if number == self._last else 0
        self._last = number
        return self._count


class Run:
    """One training: watched as `name`, or not at all."""

    def __init__(self, name: str, watched: bool) -> None:
        self.name = name
        self.watched = watched
        self.losses: list[float] = []
        self.calls: dict[str, list[tuple[Call, Tensor]]] = {}
        self.handles: list[capd_client.WatchHandle] = []

    def watch(self, model: nn.Module, name: str = "", steps: str = "all") -> None:
        if self.watched:
            self.handles.append(capd_client.watch(model, name=name or self.name, steps=steps))

    def note(self, net: Net, name: str = "", steps: tuple[int, ...] = ()) -> None:
        calls = net.reference.calls
        self.calls[name or self.name] = [kept for kept in calls if not steps or kept[0][0] in steps]


def data(count: int, first: int = 0) -> list[dict[str, Tensor]]:
    """Samples that no two forwards share."""
    return [{"x": torch.full((3,), float(first + i))} for i in range(count)]


# -- plain loops -------------------------------------------------------------------------------------------------


def plain(run: Run, net: Net, first: int, steps: int = 2) -> None:
    """A loop that counts its steps from `first`."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(first, first + steps):
        for micro_batch in range(2):
            net.reference.where = lambda at=(step, micro_batch): at
            loss = net(torch.randn(2, 3))["loss"]
            loss.backward()
            run.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()


# -- transformers ------------------------------------------------------------------------------------------------


def make_trainer(run: Run, net: Net, directory: str, kind: str = "Trainer", **options: Any) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Note(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            run.losses += [value for name, value in (logs or {}).items() if name.endswith("loss")]

    class OwnStep(Trainer):
        """A training_step without super(), and a loss of two forwards."""

        def training_step(self, model: nn.Module, inputs: Any, *_: Any) -> Tensor:
            model.train()
            loss = model(**inputs)["loss"] + 0.5 * model(**inputs)["loss"]
            self.accelerator.backward(loss)
            return loss.detach()

    arguments = TrainingArguments(
        directory, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2, save_steps=3,
        eval_strategy="steps", eval_steps=1, logging_steps=1, report_to=[], use_cpu=True, save_strategy="steps",
        disable_tqdm=True, learning_rate=0.01, remove_unused_columns=False, **options,
    )  # fmt: skip
    trainer = {"Trainer": Trainer, "OwnStep": OwnStep}[kind](
        net, arguments, train_dataset=data(10), eval_dataset=data(4, 100), callbacks=[Note()]
    )
    repeats, forwards_per_step, seen = CountRepeats(), 2 if kind == "OwnStep" else 1, [0, 0]

    def where() -> tuple[int, int]:
        if seen[0] % forwards_per_step == 0:
            seen[1] = repeats(trainer.state.global_step)
        seen[0] += 1
        return trainer.state.global_step, seen[1]

    net.reference.where = where
    return trainer


def trainer(run: Run, directory: str) -> None:
    """Accumulation with an odd batch per epoch, evaluation at every step; then resumed; then a plain loop."""
    net = Net()
    run.watch(net)
    make_trainer(run, net, directory).train()
    run.note(net)

    resumed = Net()
    run.watch(resumed, "resumed", "3-4")
    make_trainer(run, resumed, directory).train(resume_from_checkpoint=f"{directory}/checkpoint-3")
    run.note(resumed, "resumed", steps=(3, 4))

    after = Net()
    run.watch(after, "after")
    plain(run, after, first=6)
    run.note(after, "after")


def own_step(run: Run, directory: str) -> None:
    net = Net()
    run.watch(net)
    make_trainer(run, net, directory, kind="OwnStep").train()
    run.note(net)


# -- accelerate --------------------------------------------------------------------------------------------------


def accelerate(run: Run, directory: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(data(10), batch_size=2)  # type: ignore[arg-type]
    prepared, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    run.watch(prepared)
    step, repeats = [0], CountRepeats()
    net.reference.where = lambda: (step[0], repeats(step[0]))
    if run.watched:
        capd_client.set_moment(iteration=0)
        capd_client.set_moment(iteration=None)
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.losses.append(loss.item())
            with torch.no_grad():  # evaluation by a loop that forgets eval()
                prepared(**batch)
            step[0] += accelerator.sync_gradients
    run.note(net)


# -- lightning ---------------------------------------------------------------------------------------------------


def lightning_module(pl: Any, net: Net, run: Run, *, manual: bool = False) -> Any:
    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual
            self.net = net
            self.other = Net() if manual else None

        def forward(self, **batch: Tensor) -> Tensor:
            return self.net(**batch)["loss"]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if manual:
                return self.train_both(batch)
            loss = self(**batch)
            run.losses.append(loss.item())
            return loss

        def train_both(self, batch: Any) -> None:
            for part, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
                loss = part(**batch)["loss"]
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
                run.losses.append(loss.item())

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self(**batch)

        def configure_optimizers(self) -> Any:
            one = torch.optim.Adam(self.net.parameters(), lr=0.01)
            return [one, torch.optim.Adam(self.other.parameters(), lr=0.01)] if manual else one

    return Module()


def lightning_fit(pl: Any, module: Any, directory: str, **options: Any) -> Any:
    checkpoint = options.pop("ckpt_path", None)
    trainer = pl.Trainer(
        default_root_dir=directory, accelerator="cpu", devices=options.pop("devices", 1), logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=2, **options,
    )  # fmt: skip
    loaders = [
        torch.utils.data.DataLoader(data(n, first), batch_size=2)  # type: ignore[arg-type]
        for n, first in ((10 * trainer.world_size, 0), (4, 100))
    ]
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    return trainer


def where_in(module: Any, accumulate: int = 2) -> tuple[int, int]:
    trainer = module.trainer
    return trainer.global_step, trainer.fit_loop.epoch_loop.batch_idx % accumulate


def lightning(run: Run, directory: str) -> None:
    """Accumulation with an odd batch per epoch, validation twice per epoch; then resumed from the middle."""
    import lightning.pytorch as pl

    net = Net()
    module = lightning_module(pl, net, run)
    net.reference.where = partial(where_in, module)
    run.watch(module)
    options = {"accumulate_grad_batches": 2, "val_check_interval": 2, "max_epochs": 2}
    trainer = lightning_fit(pl, module, directory, enable_checkpointing=False, **options)
    trainer.save_checkpoint(f"{directory}/last.ckpt")
    run.note(net)

    net = Net()
    module = lightning_module(pl, net, run)
    net.reference.where = partial(where_in, module)
    run.watch(module, "lightning_resumed", steps="6-7")
    options["max_epochs"] = 3
    lightning_fit(
        pl, module, directory, enable_checkpointing=False, ckpt_path=f"{directory}/last.ckpt", **options
    )
    run.note(net, "lightning_resumed", steps=(6, 7))


def lightning_manual(run: Run, directory: str) -> None:
    """Two optimizers that take turns inside of training_step; `global_step` counts both."""
    import pytorch_lightning as pl

    net = Net()
    module = lightning_module(pl, net, run, manual=True)
    for part in (module.net, module.other):
        part.reference.where = lambda: (module.trainer.global_step, 0)
    run.watch(module)
    lightning_fit(pl, module, directory, enable_checkpointing=False, max_epochs=1)
    run.note(net, "lightning_manual.net")
    run.note(module.other, "lightning_manual.other")


def lightning_ddp(run: Run, directory: str) -> None:
    import lightning.pytorch as pl

    net = Net()
    module = lightning_module(pl, net, run)
    net.reference.where = partial(where_in, module)
    run.watch(module)
    lightning_fit(
        pl, module, directory, enable_checkpointing=False, strategy="ddp", devices=2, max_epochs=2,
        accumulate_grad_batches=2,
    )  # fmt: skip
    run.note(net)


def fabric(run: Run, directory: str) -> None:
    """A loop of one's own with Lightning's Fabric."""
    from lightning.fabric import Fabric

    loop = Fabric(accelerator="cpu", devices=1)
    net = Net()
    model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.01))
    run.watch(model)
    if run.watched:
        capd_client.set_moment(iteration=20)
        capd_client.set_moment(iteration=None)
    for step in range(20, 23):
        for micro_batch in range(2):
            net.reference.where = lambda at=(step, micro_batch): at
            loss = model(torch.randn(2, 3))["loss"]
            loop.backward(loss)
            run.losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    run.note(net)


def is_patched() -> bool:
    """Whether any method that capd's step counters patch is theirs now, of the frameworks imported here."""
    owners = (
        (vars(sys.modules[patch.module]).get(patch.owner), patch.method)
        for patch in frameworks.PATCHES
        if patch.module in sys.modules
    )
    methods = (vars(owner).get(method) for owner, method in owners if owner is not None)
    ours = (patches.__file__, frameworks.__file__)
    return any(m is not None and m.__code__.co_filename in ours for m in methods)


def main() -> None:
    out, *names = sys.argv[1:]
    result: dict[str, Any] = {"calls": {}, "losses": {}}
    for name in names:
        runs = [Run(name, watched) for watched in (True, False)]
        for run in runs:
            torch.manual_seed(5)
            globals()[name](run, f"{out}.{name}.{run.watched}")
            assert is_patched() == run.watched or name in ("accelerate", "fabric")
            for handle in run.handles:
                handle.remove()
            assert not is_patched()
        result["calls"] |= runs[0].calls
        result["losses"][name] = [run.losses for run in runs]
    assert capd_client.flush(60)
    counters = capd_client.counters()
    result["counters"] = {**counters, "dropped": dict(counters["dropped"])}
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(result, f"{out}.{rank}.pt")


if __name__ == "__main__":
    main()
