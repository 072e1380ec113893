"""What the run of each scenario must hold (transformers_scenarios.py), which follows from its model's configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.integration.transformers import transformers_models as models
from tests.integration.transformers import transformers_oracle as oracle
from tests.integration.transformers import transformers_stacks as stacks
from tests.integration.transformers.transformers_products import MICRO_BATCHES, STEPS, Product

BACKWARD = ("grad_input", "grad_weight", "grad_output", "grad_query", "grad_key", "grad_value")

Expected = dict[oracle.Name, oracle.Series]


def recorded(products: list[Product], steps: range = range(STEPS)) -> Expected:
    return oracle.expected(products, steps=steps, micro_batches=MICRO_BATCHES)


@dataclass(frozen=True)
class Scenario:
    """What a run must hold. attention, gradient: how far off the softmax and its gradients may be."""

    products: list[Product]
    expected: Expected
    attention: float = 1e-6
    gradient: float = 1e-5


def of(products: list[Product], **bounds: float) -> Scenario:
    return Scenario(products, recorded(products), **bounds)


def of_lora() -> Scenario:
    (frozen, default), (_, other) = models.lora("default", 3), models.lora("other", 3)
    series = {**recorded(frozen), **recorded(default, range(1)), **recorded(other, range(1, 2))}
    return Scenario([*frozen, *default, *other], series)


LLAMA, SHALLOW = of(models.llama().products), of(models.llama(layers=1).products)
FORWARD_ONLY = [replace(product, lacks=BACKWARD) for product in SHALLOW.products]

SCENARIOS = {
    **dict.fromkeys(("sdpa", "switching", "trainer", "trainer-reentrant", "trainer-non-reentrant"), LLAMA),
    **dict.fromkeys(("eager", "mine", "generating", "copied", "trainer-compiled"), SHALLOW),
    "flex": Scenario(FORWARD_ONLY, recorded(FORWARD_ONLY, range(1))),
    "tied": of(models.llama(layers=1, tie_word_embeddings=True).products),
    "lora": of_lora(),
    **{name: of(getattr(models, name)().products) for name in ("gpt2", "deepseek")},
    **{name: of(getattr(stacks, name)().products) for name in ("bert", "whisper", "t5", "clip")},
    **{f"{name}-grouped_mm": of(getattr(models, name)().products) for name in ("mixtral", "qwen3_moe")},
    "trainer-seq2seq": of(stacks.t5().products),
    "trainer-bf16": replace(SHALLOW, attention=1e-2, gradient=1e-2),  # it rounds where the reference does not
}
