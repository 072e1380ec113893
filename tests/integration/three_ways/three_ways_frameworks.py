"""Rows of frameworks that bring a training loop, or a part of one, on one rank."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.integration.three_ways.three_ways_rows import (
    MICRO_BATCHES,
    STEPS,
    Losses,
    Row,
    loop,
    moments,
    words,
)
from tests.kit.models import plain_models as models

if TYPE_CHECKING:
    from tests.integration.three_ways.three_ways_job import Script


# -- transformers ------------------------------------------------------------------------------------------------


def llama(script: Script) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=models.VOCABULARY, hidden_size=models.WIDTH, intermediate_size=models.HIDDEN, num_hidden_layers=2,
        num_attention_heads=models.HEADS, num_key_value_heads=models.HEADS, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    script.watch(model)
    script.attention_returns(lambda output: output.transpose(1, 2))
    return model


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Tokens, as many as all steps of a training need."""

    def __len__(self) -> int:
        return STEPS * MICRO_BATCHES * models.BATCH

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(at)
        tokens = torch.randint(3, models.VOCABULARY, (models.SEQUENCE,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def trainer(script: Script, **options: Any) -> Losses:
    """The Trainer, which evaluates after each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    model, losses = llama(script), []

    class Told(TrainerCallback):
        """Where the Trainer itself says that it is."""

        micro_batch = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.micro_batch = 0
            script.at(state.global_step, 0)

        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.micro_batch += 1
            script.at(state.global_step, self.micro_batch)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            script.off()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            losses.extend(torch.tensor(value) for name, value in logs.items() if name.endswith("loss"))

    with tempfile.TemporaryDirectory(prefix="capd-ways-") as directory:
        arguments = TrainingArguments(
            output_dir=directory, max_steps=STEPS, per_device_train_batch_size=models.BATCH, eval_steps=1,
            gradient_accumulation_steps=MICRO_BATCHES, learning_rate=1e-2, logging_steps=1, eval_strategy="steps",
            report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, **options,
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[Told()]).train()
    return losses


def trainer_checkpointed(script: Script) -> Losses:
    return trainer(script, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})


def trainer_bf16(script: Script) -> Losses:
    return trainer(script, bf16=True)


def trainer_compiled(script: Script) -> Losses:
    return trainer(script, torch_compile=True, torch_compile_backend="aot_eager")


def transformers_loop(script: Script) -> Losses:
    def loss_of(model: Any, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, models.VOCABULARY, (models.BATCH, models.SEQUENCE), generator=generator)
        return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    return loop(script, llama(script).train(), loss_of)


def peft(script: Script) -> Losses:
    """Adapters on a frozen model."""
    from peft import LoraConfig, get_peft_model

    base = models.Decoder()
    adapted = get_peft_model(base, LoraConfig(target_modules=["q", "v"], r=2, lora_dropout=0.1))
    script.watch(base, wrapped=adapted)
    return loop(script, adapted, words)


# -- accelerate --------------------------------------------------------------------------------------------------


def accelerate(script: Script) -> Losses:
    """Accumulation by `accumulate`, with an optimizer that steps when it lets it."""
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=True)
    model = models.Decoder()
    script.watch(model)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _, _, seed in moments(script):
        with accelerator.accumulate(wrapped):
            loss = words(wrapped, seed)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# -- Lightning ---------------------------------------------------------------------------------------------------


def lightning(script: Script) -> Losses:
    """Automatic optimisation with accumulation; validation before the training and between its batches."""
    import lightning.pytorch as pl

    losses: Losses = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = models.Decoder()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            script.at(self.trainer.global_step, batch_idx % MICRO_BATCHES)
            loss = words(self.net, int(batch))
            losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            script.off()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            losses.append(words(self.net, int(batch)))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Module()
    script.watch(module)
    fit(pl, module, accumulate_grad_batches=MICRO_BATCHES)
    return losses


def lightning_manual(script: Script) -> Losses:
    """One optimiser, stepped by hand at the end of each accumulation."""
    import lightning.pytorch as pl

    losses: Losses = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = models.Decoder()

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            micro_batch = batch_idx % MICRO_BATCHES
            script.at(batch_idx // MICRO_BATCHES, micro_batch)
            loss = words(self.net, int(batch))
            self.manual_backward(loss)
            losses.append(loss.detach())
            if micro_batch == MICRO_BATCHES - 1:
                self.optimizers().step()
                self.optimizers().zero_grad()
            script.off()

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            losses.append(words(self.net, int(batch)))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    module = Module()
    script.watch(module)
    fit(pl, module)
    return losses


def fit(pl: Any, module: Any, **options: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="capd-ways-") as directory:
        trainer = pl.Trainer(
            default_root_dir=directory, accelerator="cpu", devices=1, logger=False, max_epochs=1,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, val_check_interval=2,
            num_sanity_val_steps=1, **options,
        )  # fmt: skip
        training = DataLoader(range(STEPS * MICRO_BATCHES))  # type: ignore[arg-type]
        trainer.fit(module, training, DataLoader(range(90, 92)))  # type: ignore[arg-type]


def fabric(script: Script) -> Losses:
    """A loop of one's own with Lightning's Fabric."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = models.Decoder()
    script.watch(model)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _, micro_batch, seed in moments(script):
        loss = words(wrapped, seed)
        fabric.backward(loss)
        losses.append(loss.detach())
        if micro_batch == MICRO_BATCHES - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


_TRAINER = ("transformers", "transformers.trainer", "transformers.models.llama.modeling_llama")
_LIGHTNING = ("lightning.pytorch",)

ROWS: dict[str, Row] = {
    "trainer": Row(trainer, imports=_TRAINER),
    "trainer_checkpointed": Row(trainer_checkpointed, imports=_TRAINER),
    "trainer_bf16": Row(trainer_bf16, imports=_TRAINER),
    "trainer_compiled": Row(trainer_compiled, imports=_TRAINER),
    "transformers_loop": Row(transformers_loop, imports=_TRAINER),
    "peft": Row(peft, imports=("peft",)),
    "accelerate": Row(accelerate, imports=("accelerate",)),
    "lightning": Row(lightning, imports=_LIGHTNING),
    "lightning_manual": Row(lightning_manual, imports=_LIGHTNING),
    "fabric": Row(fabric, imports=_LIGHTNING),
}
