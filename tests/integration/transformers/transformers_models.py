"""Tiny decoders of Hugging Face transformers, made from their configuration, and what each of them computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.integration.transformers.transformers_products import (
    BATCH,
    EXPERTS,
    HEAD,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    SEQUENCE,
    TOP_K,
    VOCABULARY,
    WIDTH,
    Model,
    Product,
    attention,
    experts,
    linear,
    router,
    tokens,
)  # fmt: skip

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


def llama(layers: int = LAYERS, **options: Any) -> Model:
    """Grouped-query attention: two query heads for each key."""

    def make() -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**{**LLAMA_OPTIONS, "num_hidden_layers": layers}, **options))

    products = [p for layer in range(layers) for p in (*_llama_attention(layer), *_llama_mlp(layer))]
    tied = options.get("tie_word_embeddings", False)
    return Model(make, tokens, [*products, linear("lm_head", WIDTH, VOCABULARY, tied=tied)])


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


# -- GPT-2 ----------------------------------------------------------------------------------------------


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


# -- mixtures of experts --------------------------------------------------------------------------------


def qwen3_moe(**options: Any) -> Model:
    """Queries and keys are normalised between their linears and attention."""

    def make() -> Any:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        own = {
            "num_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "moe_intermediate_size": INNER,
            "head_dim": HEAD,
        }
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**LLAMA_OPTIONS, **own, **options))

    return Model(make, tokens, mixtral().products)


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


def listed_mixtral() -> list[Product]:
    """Of Mixtral before transformers 5 all but its experts, each of which is made of three nn.Linear."""
    layers = [
        product
        for layer in range(LAYERS)
        for product in (
            *_llama_attention(layer),
            router(f"model.layers.{layer}.block_sparse_moe.gate", layer=layer),
        )
    ]
    return [*layers, linear("lm_head", WIDTH, VOCABULARY)]


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
