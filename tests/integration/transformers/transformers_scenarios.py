"""Trainings of transformers' models, by name: given what watches a model, or does not, each returns its losses."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

from tests.integration.transformers import transformers_models as models
from tests.integration.transformers import transformers_stacks as stacks
from tests.integration.transformers.transformers_products import BATCH, MICRO_BATCHES, STEPS, Model, tokens

EVALUATION = 1000  # the first batch of it
Losses = list[str]
Watch = Callable[[nn.Module], Any]
Training = Callable[[Watch], Losses]


def loop(model: nn.Module, batch: Callable[[int], Any], steps: int = STEPS, first: int = 0) -> Losses:
    """A plain training loop: gradient accumulation, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(first, first + steps):
        for micro_batch in range(MICRO_BATCHES):
            loss = model(**batch(step * MICRO_BATCHES + micro_batch)).loss / MICRO_BATCHES
            loss.backward()
            losses.append(loss.item().hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class _Rows(torch.utils.data.IterableDataset):
    """Single rows in a fixed order: batch after batch from `first` on."""

    def __init__(self, batch: Callable[[int], dict[str, torch.Tensor]], first: int, batches: int) -> None:
        self._batch = batch
        self._numbers = range(first, first + batches)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in self._numbers:
            batch = self._batch(number)
            for row in range(BATCH):
                yield {name: tensor[row] for name, tensor in batch.items()}


class _Losses(TrainerCallback):
    def __init__(self) -> None:
        self.losses: Losses = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.losses += [float(logs[name]).hex() for name in ("loss", "eval_loss") if name in logs]


def train(
    model: nn.Module, batch: Callable[[int], Any] = tokens, kind: type[Trainer] = Trainer, **options: Any
) -> Losses:
    """A Trainer of transformers, which evaluates after every step."""
    losses = _Losses()
    with tempfile.TemporaryDirectory(prefix="capd-t-") as directory:
        arguments: dict[str, Any] = {
            "output_dir": directory, "max_steps": STEPS, "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH, "gradient_accumulation_steps": MICRO_BATCHES,
            "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "report_to": [],
            "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, **options,
        }  # fmt: skip
        settings = Seq2SeqTrainingArguments if kind is Seq2SeqTrainer else TrainingArguments
        kind(
            model,
            settings(**arguments),
            train_dataset=_Rows(batch, 0, STEPS * MICRO_BATCHES),
            eval_dataset=_Rows(batch, EVALUATION, 2),
            callbacks=[losses],
        ).train()
    return losses.losses


# -- scenarios: each trains a model, watched or not, and returns its losses -------------------------------


def _plain(model: Model, **options: Any) -> Training:
    def run(watch: Watch) -> Losses:
        made = model.make().train()
        for name, value in options.items():
            getattr(made, name)(**value)
        watch(made)
        return loop(made, model.batch)

    return run


def _trainer(model: Model, **options: Any) -> Training:
    def run(watch: Watch) -> Losses:
        made = model.make()
        watch(made)
        return train(made, model.batch, **options)

    return run


def _generating(watch: Watch) -> Losses:
    """Generates before, between and amid training: in evaluation as it should be, and in training mode as some do."""
    model = models.llama(layers=1).make().train()
    watch(model)
    drawn: list[Any] = []
    for step in range(STEPS):
        if step:
            model.eval()
        drawn += model.generate(tokens(7)["input_ids"], max_new_tokens=3, do_sample=False).tolist()
        model.train()
        drawn += loop(model, tokens, steps=1, first=step)
    return [str(one) for one in drawn]


def _switching(watch: Watch) -> Losses:
    """The attention is another one in the second step."""
    model = models.llama(attn_implementation="sdpa").make().train()
    watch(model)
    losses = loop(model, tokens, steps=1)
    model.set_attn_implementation("eager")
    return losses + loop(model, tokens, steps=1, first=1)


def _copied(watch: Watch) -> Losses:
    """Between two steps the model is copied, pickled, saved and loaded; the copies train as it does."""
    model = models.llama(layers=1).make().train()
    watch(model)
    losses = loop(model, tokens, steps=1)
    with tempfile.TemporaryDirectory(prefix="capd-t-") as directory:
        model.save_pretrained(directory)
        loaded = type(model).from_pretrained(directory).train()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):  # noqa: S301
        loss = copied(**tokens(1)).loss
        loss.backward()
        losses += [loss.item().hex(), *copied.state_dict()]
    return losses + loop(model, tokens, steps=1, first=1)


def _own_attention(watch: Watch) -> Losses:
    """An attention that the job registers itself, as kernels from elsewhere are."""
    from transformers import AttentionInterface

    AttentionInterface.register("mine", _attention)
    model = models.llama(layers=1, attn_implementation="mine").make().train()
    watch(model)
    return loop(model, tokens)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float, dropout: float = 0.0, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    assert attention_mask is None
    assert dropout == 0.0
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    later = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(later, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2), None


def _flexible(watch: Watch) -> Losses:
    """flex_attention, which has no backward on a CPU: forwards in training mode."""
    torch.compile = partial(torch.compile, backend="eager")  # inductor's takes a minute
    model = models.llama(layers=1, attn_implementation="flex_attention").make().train().requires_grad_(False)
    watch(model)
    return [model(**tokens(number)).loss.item().hex() for number in range(MICRO_BATCHES)]


def _lora(watch: Watch) -> Losses:
    """One adapter is trained in the first step, another in the second; then they are merged."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(models.llama().make(), config).train()
    model.add_adapter("other", config)
    watch(model)
    losses = loop(model, tokens, steps=1)
    model.set_adapter("other")
    losses += loop(model, tokens, steps=1, first=1)
    merged = model.merge_and_unload()
    return [*losses, float(merged.eval()(**tokens(0)).loss).hex()]


SCENARIOS: dict[str, Training] = {
    "sdpa": _plain(models.llama(attn_implementation="sdpa")),
    "eager": _plain(models.llama(layers=1, attn_implementation="eager")),
    "mine": _own_attention,
    "flex": _flexible,
    "switching": _switching,
    "generating": _generating,
    "copied": _copied,
    "gpt2": _plain(models.gpt2()),
    "bert": _plain(stacks.bert()),
    "whisper": _plain(stacks.whisper()),
    "t5": _plain(stacks.t5()),
    "clip": _plain(stacks.clip()),
    "deepseek": _plain(models.deepseek()),
    **{
        f"{family.__name__}-{name}": _plain(family(experts_implementation=name))
        for family in (models.mixtral, models.qwen3_moe)
        for name in ("grouped_mm", "batched_mm", "eager")
    },
    "mixtral": _plain(models.mixtral()),
    "tied": _plain(models.llama(layers=1, tie_word_embeddings=True)),
    "lora": _lora,
    "trainer": _trainer(models.llama()),
    "trainer-seq2seq": _trainer(
        stacks.t5(), kind=Seq2SeqTrainer, predict_with_generate=True, generation_max_length=4
    ),
    "trainer-bf16": _trainer(models.llama(layers=1), bf16=True),
    **{
        f"trainer-{name}": _trainer(
            models.llama(),
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": name == "reentrant"},
        )
        for name in ("reentrant", "non-reentrant")
    },
    "trainer-compiled": _trainer(
        models.llama(layers=1), torch_compile=True, torch_compile_backend="aot_eager"
    ),
}
