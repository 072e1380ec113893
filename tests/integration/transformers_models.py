"""Tiny models of Hugging Face transformers, made from their configuration, and what each of them computes.

`Model.products` is written from the configuration alone: the name, layer and stack of every matrix product of one
forward, and the shapes of its tensors. Nothing in it asks a module, a hook or capd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

VOCABULARY, WIDTH, INNER, HEADS, KV_HEADS, HEAD = 37, 16, 24, 4, 2, 4
LAYERS, EXPERTS, TOP_K = 2, 8, 2
BATCH, SEQUENCE, FRAMES, MELS = 2, 5, 12, 8

CLASSES = (
    "LlamaForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "WhisperForConditionalGeneration",
    "CLIPModel", "DeepseekV3ForCausalLM", "AttentionInterface",
)  # fmt: skip
"""What is used of transformers; older ones lack the last."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Product:
    """One matrix product of a forward.

    shapes: of the operands, the parameter and the output. source: for an attention, the modules whose outputs are its
    query, key and value, where nothing lies between. target: the module that its output is the input of.
    """

    module: str
    layer: int | None
    stack: str
    component: str
    shapes: dict[str, Shape]
    transposed: bool = False  # the weight is [in, out]
    causal: bool = False
    scale: float = HEAD**-0.5
    source: tuple[str, ...] = ()
    target: str = ""
    lacks: tuple[str, ...] = ()  # gradients that nothing computes
    tied: bool = False  # its weight is that of the embedding, whose gradient is added


@dataclass(frozen=True)
class Model:
    """How to make a model (its weights follow from the seed), a batch of it, and what it computes."""

    make: Callable[[], Any]
    batch: Callable[[int], dict[str, torch.Tensor]]
    products: list[Product] = field(default_factory=list)


def tokens(number: int) -> dict[str, torch.Tensor]:
    """Batch `number` of a causal model; another one for every number."""
    drawn = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(number))
    return {"input_ids": drawn, "labels": drawn.clone()}


def linear(
    module: str,
    inside: int,
    outside: int,
    *,
    layer: int | None = None,
    stack: str = "",
    rows: Shape = (),
    **more: Any,
) -> Product:
    """Y = XWᵀ; `rows` are the dimensions of X before its last one."""
    rows = rows or (BATCH, SEQUENCE)
    weight = (inside, outside) if more.get("transposed") else (outside, inside)
    shapes = {"input": (*rows, inside), "weight": weight, "output": (*rows, outside)}
    return Product(module, layer, stack, "linear", shapes, **more)


def attention(
    module: str, *, layer: int, stack: str, kv_heads: int = HEADS, queries: int = SEQUENCE, keys: int = SEQUENCE,
    head: int = HEAD, value_head: int = HEAD, batch: int = BATCH, **more: Any,
) -> Product:  # fmt: skip
    """Query, key and value as [batch, heads, sequence, head], the output as [batch, sequence, heads, head]."""
    shapes = {
        "query": (batch, HEADS, queries, head), "key": (batch, kv_heads, keys, head),
        "value": (batch, kv_heads, keys, value_head), "output": (batch, queries, HEADS, value_head),
    }  # fmt: skip
    return Product(module, layer, stack, "FA", shapes, **more)


# -- Llama ------------------------------------------------------------------------------------------------


def _llama_attention(layer: int) -> list[Product]:
    at, place = f"model.layers.{layer}.self_attn", {"layer": layer, "stack": "model"}
    return [
        linear(f"{at}.q_proj", WIDTH, HEADS * HEAD, **place),
        linear(f"{at}.k_proj", WIDTH, KV_HEADS * HEAD, **place),
        linear(f"{at}.v_proj", WIDTH, KV_HEADS * HEAD, **place),
        attention(
            at,
            kv_heads=KV_HEADS,
            causal=True,
            source=("", "", f"{at}.v_proj"),
            target=f"{at}.o_proj",
            **place,
        ),
        linear(f"{at}.o_proj", HEADS * HEAD, WIDTH, **place),
    ]


def _llama_mlp(layer: int) -> list[Product]:
    at, place = f"model.layers.{layer}.mlp", {"layer": layer, "stack": "model"}
    ups = [linear(f"{at}.{name}", WIDTH, INNER, **place) for name in ("gate_proj", "up_proj")]
    return [*ups, linear(f"{at}.down_proj", INNER, WIDTH, **place)]


LLAMA_OPTIONS = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def llama(**options: Any) -> Model:
    """Grouped-query attention: two query heads for each key."""

    def make() -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**LLAMA_OPTIONS, **options))

    layers = [p for layer in range(LAYERS) for p in (*_llama_attention(layer), *_llama_mlp(layer))]
    tied = options.get("tie_word_embeddings", False)
    return Model(make, tokens, [*layers, linear("lm_head", WIDTH, VOCABULARY, tied=tied)])


def lora(adapter: str, rank: int) -> tuple[list[Product], list[Product]]:
    """What is computed of a Llama with adapters on q_proj and v_proj: by the frozen model, and by one adapter.

    The embedding is frozen, too: what depends on nothing that learns gets no gradient.
    """
    frozen, own = [], []
    for product in llama().products:
        name, lacks = product.module, ["grad_weight"]
        first = product.layer == 0
        if first and name.endswith(("q_proj", "k_proj", "v_proj")):
            lacks += ["grad_input", "grad_output"]
        if first and product.component == "FA":
            lacks += ["grad_key"]
        adapted = name.endswith(("q_proj", "v_proj"))
        module = f"{name}.base_layer" if adapted else name
        source = tuple("" for _ in product.source)
        frozen.append(replace(product, module=module, lacks=tuple(lacks), source=source))
        if adapted:
            place = {"layer": product.layer, "stack": product.stack}
            nothing = ("grad_input",) if first else ()
            outside = product.shapes["output"][-1]
            own.append(linear(f"{name}.lora_A.{adapter}", WIDTH, rank, lacks=nothing, **place))
            own.append(linear(f"{name}.lora_B.{adapter}", rank, outside, **place))
    return frozen, own


# -- mixtures of experts ----------------------------------------------------------------------------------


def router(module: str, *, layer: int) -> Product:
    return linear(module, WIDTH, EXPERTS, layer=layer, stack="model", rows=(BATCH * SEQUENCE,))


def experts(module: str, *, layer: int, width: int) -> list[Product]:
    """Two grouped products, their rows sorted by expert; `offsets` says where each expert's rows end."""
    rows, products = BATCH * SEQUENCE * TOP_K, []
    for name, inside, outside in (("gate_up_proj", WIDTH, 2 * width), ("down_proj", width, WIDTH)):
        shapes = {
            "input": (rows, inside), "offsets": (EXPERTS,), "weight": (EXPERTS, outside, inside),
            "output": (rows, outside),
        }  # fmt: skip
        products.append(Product(f"{module}.{name}", layer, "model", "grouped_linear", shapes))
    return products


def mixtral(**options: Any) -> Model:
    """Experts as two three-dimensional parameters, as in transformers 5."""

    def make() -> Any:
        from transformers import MixtralConfig, MixtralForCausalLM

        own = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}
        return MixtralForCausalLM(MixtralConfig(**LLAMA_OPTIONS, **own, **options))

    layers = [
        product
        for layer in range(LAYERS)
        for product in (
            *_llama_attention(layer),
            router(f"model.layers.{layer}.mlp.gate", layer=layer),
            *experts(f"model.layers.{layer}.mlp.experts", layer=layer, width=INNER),
        )
    ]
    return Model(make, tokens, [*layers, linear("lm_head", WIDTH, VOCABULARY)])


# -- GPT-2 and BERT ---------------------------------------------------------------------------------------


def gpt2() -> Model:
    """Conv1D: the weight is [in, out], and one product makes query, key and value. Its dropout draws numbers."""

    def make() -> Any:
        from transformers import GPT2Config, GPT2LMHeadModel

        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=WIDTH,
                n_layer=LAYERS,
                n_head=HEADS,
                n_positions=32,
                n_inner=INNER,
                attn_pdrop=0.0,
                resid_pdrop=0.1,
                embd_pdrop=0.1,
                bos_token_id=1,
                eos_token_id=2,
            )
        )

    products = []
    for layer in range(LAYERS):
        at, place = f"transformer.h.{layer}", {"layer": layer, "stack": "transformer"}
        inputs = (f"{at}.attn.c_attn",) * 3
        products += [
            linear(f"{at}.attn.c_attn", WIDTH, 3 * WIDTH, transposed=True, **place),
            attention(f"{at}.attn", causal=True, source=inputs, target=f"{at}.attn.c_proj", **place),
            linear(f"{at}.attn.c_proj", WIDTH, WIDTH, transposed=True, **place),
            linear(f"{at}.mlp.c_fc", WIDTH, INNER, transposed=True, **place),
            linear(f"{at}.mlp.c_proj", INNER, WIDTH, transposed=True, **place),
        ]
    return Model(make, tokens, [*products, linear("lm_head", WIDTH, VOCABULARY, tied=True)])


def bert() -> Model:
    """An encoder: attention without a mask."""

    def make() -> Any:
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=WIDTH,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                intermediate_size=INNER,
                max_position_embeddings=32,
                attention_probs_dropout_prob=0.0,
            )
        )

    products = []
    for layer in range(LAYERS):
        at, place = f"bert.encoder.layer.{layer}", {"layer": layer, "stack": "bert.encoder"}
        inputs = tuple(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))
        products += [
            *(linear(name, WIDTH, WIDTH, **place) for name in inputs),
            attention(f"{at}.attention.self", source=inputs, target=f"{at}.attention.output.dense", **place),
            linear(f"{at}.attention.output.dense", WIDTH, WIDTH, **place),
            linear(f"{at}.intermediate.dense", WIDTH, INNER, **place),
            linear(f"{at}.output.dense", INNER, WIDTH, **place),
        ]
    head = "cls.predictions"
    products.append(linear(f"{head}.transform.dense", WIDTH, WIDTH))
    return Model(make, tokens, [*products, linear(f"{head}.decoder", WIDTH, VOCABULARY, tied=True)])


# -- two stacks -------------------------------------------------------------------------------------------


def _stack_layer(
    at: str, place: dict[str, Any], rows: Shape, attentions: dict[str, tuple[int, bool, bool]], bias: str
) -> list[Product]:
    """One layer of Whisper or CLIP. `attentions`: name → length of its keys, whether causal, whether scaled inside."""
    products = []
    for name, (keys, causal, scaled) in attentions.items():
        own = {"q_proj": rows, "k_proj": (rows[0], keys), "v_proj": (rows[0], keys), "out_proj": rows}
        products += [linear(f"{at}.{name}.{p}", WIDTH, WIDTH, rows=r, **place) for p, r in own.items()]
        inputs = tuple(
            f"{at}.{name}.{p}" if p != "q_proj" or scaled else "" for p in ("q_proj", "k_proj", "v_proj")
        )
        products.append(
            attention(
                f"{at}.{name}",
                batch=rows[0],
                queries=rows[1],
                keys=keys,
                causal=causal,
                source=inputs,
                scale=HEAD**-0.5 if scaled else 1.0,
                target=f"{at}.{name}.out_proj",
                **place,
            )
        )
    fc1, fc2 = (f"{at}.{bias}fc1", f"{at}.{bias}fc2")
    return [
        *products,
        linear(fc1, WIDTH, INNER, rows=rows, **place),
        linear(fc2, INNER, WIDTH, rows=rows, **place),
    ]


def whisper() -> Model:
    """Encoder and decoder count their layers both from 0; the decoder attends to itself and to the encoder."""

    def make() -> Any:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        return WhisperForConditionalGeneration(
            WhisperConfig(
                vocab_size=VOCABULARY,
                num_mel_bins=MELS,
                d_model=WIDTH,
                max_source_positions=FRAMES // 2,
                max_target_positions=12,
                encoder_layers=LAYERS,
                decoder_layers=LAYERS,
                encoder_attention_heads=HEADS,
                decoder_attention_heads=HEADS,
                encoder_ffn_dim=INNER,
                decoder_ffn_dim=INNER,
                decoder_start_token_id=1,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                suppress_tokens=None,
                begin_suppress_tokens=None,
                tie_word_embeddings=True,
            )
        )

    def batch(number: int) -> dict[str, torch.Tensor]:
        features = torch.randn(BATCH, MELS, FRAMES, generator=torch.Generator().manual_seed(number))
        return {"input_features": features, "labels": tokens(number)["labels"]}

    products = []
    for layer in range(LAYERS):
        for stack, length, attentions in (
            ("model.encoder", FRAMES // 2, {"self_attn": (FRAMES // 2, False, False)}),
            (
                "model.decoder",
                SEQUENCE,
                {"self_attn": (SEQUENCE, True, False), "encoder_attn": (FRAMES // 2, False, False)},
            ),
        ):
            place = {"layer": layer, "stack": stack}
            products += _stack_layer(f"{stack}.layers.{layer}", place, (BATCH, length), attentions, "")
    return Model(make, batch, [*products, linear("proj_out", WIDTH, VOCABULARY, tied=True)])


def clip() -> Model:
    """A text tower and a vision tower."""
    patches, projection = 5, 12  # four of 4 x 4 pixels, and the class

    def make() -> Any:
        from transformers import CLIPConfig, CLIPModel

        sides = {
            "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS
        }  # fmt: skip
        text = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
        vision = {"image_size": 8, "patch_size": 4}
        both = {"text_config": {**sides, **text}, "vision_config": {**sides, **vision}}
        return CLIPModel(CLIPConfig(**both, projection_dim=projection))

    def batch(number: int) -> dict[str, Any]:
        pixels = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens(number)["input_ids"], "pixel_values": pixels, "return_loss": True}

    products = []
    for layer in range(LAYERS):
        for stack, rows, causal in (
            ("text_model.encoder", (BATCH, SEQUENCE), True),
            ("vision_model.encoder", (BATCH, patches), False),
        ):
            place = {"layer": layer, "stack": stack}
            attentions = {"self_attn": (rows[1], causal, True)}
            products += _stack_layer(f"{stack}.layers.{layer}", place, rows, attentions, "mlp.")
    for name in ("visual_projection", "text_projection"):
        products.append(linear(name, WIDTH, projection, rows=(BATCH,)))
    return Model(make, batch, products)


def deepseek() -> Model:
    """Latent attention (the value's heads are narrower than the query's), a dense layer, and one of experts."""
    rank, rope, value, narrow = 8, 4, 3, 8
    head = HEAD + rope

    def make() -> Any:
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        return DeepseekV3ForCausalLM(
            DeepseekV3Config(
                **{**LLAMA_OPTIONS, "num_key_value_heads": HEADS},
                moe_intermediate_size=narrow,
                n_shared_experts=1,
                n_routed_experts=EXPERTS,
                n_group=2,
                topk_group=1,
                num_experts_per_tok=TOP_K,
                first_k_dense_replace=1,
                kv_lora_rank=rank,
                q_lora_rank=rank,
                qk_rope_head_dim=rope,
                qk_nope_head_dim=HEAD,
                v_head_dim=value,
            )
        )

    products = []
    for layer in range(LAYERS):
        at, place = f"model.layers.{layer}", {"layer": layer, "stack": "model"}
        products += [
            linear(f"{at}.self_attn.q_a_proj", WIDTH, rank, **place),
            linear(f"{at}.self_attn.q_b_proj", rank, HEADS * head, **place),
            linear(f"{at}.self_attn.kv_a_proj_with_mqa", WIDTH, rank + rope, **place),
            linear(
                f"{at}.self_attn.kv_b_proj", rank, HEADS * (HEAD + value), rows=(BATCH, 1, SEQUENCE), **place
            ),
            attention(
                f"{at}.self_attn",
                head=head,
                value_head=value,
                causal=True,
                scale=head**-0.5,
                target=f"{at}.self_attn.o_proj",
                **place,
            ),
            linear(f"{at}.self_attn.o_proj", HEADS * value, WIDTH, **place),
        ]
        if layer == 0:
            products += _llama_mlp(layer)
            continue
        products += [
            router(f"{at}.mlp.gate", layer=layer),
            *experts(f"{at}.mlp.experts", layer=layer, width=narrow),
        ]
        for name, inside, outside in (
            ("gate_proj", WIDTH, narrow), ("up_proj", WIDTH, narrow), ("down_proj", narrow, WIDTH)
        ):  # fmt: skip
            products.append(linear(f"{at}.mlp.shared_experts.{name}", inside, outside, **place))
    return Model(make, tokens, [*products, linear("lm_head", WIDTH, VOCABULARY)])
