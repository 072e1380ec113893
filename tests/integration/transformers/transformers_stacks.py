"""Tiny models with an encoder, alone, beside a decoder or beside another one, and what each of them computes."""

from __future__ import annotations

from typing import Any

import torch

from tests.integration.transformers.transformers_products import (
    BATCH,
    FRAMES,
    HEAD,
    HEADS,
    INNER,
    LAYERS,
    MELS,
    SEQUENCE,
    VOCABULARY,
    WIDTH,
    Model,
    Product,
    Shape,
    attention,
    linear,
    tokens,
)  # fmt: skip


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


_T5_BUCKETS = 32
_T5_BIAS = torch.arange(_T5_BUCKETS * HEADS).view(_T5_BUCKETS, HEADS).sin()
"""What is added to the scores of two tokens, by their distance's bucket and by head."""


def _t5_bias(tokens: int, *, both_ways: bool) -> torch.Tensor:
    """[heads, queries, keys]. The texts are short: every distance has a bucket of its own."""
    place = torch.arange(tokens)
    distance = place[:, None] - place  # from the query back to the key
    ahead = -distance + _T5_BUCKETS // 2 if both_ways else torch.zeros_like(distance)
    return _T5_BIAS[torch.where(distance < 0, ahead, distance)].permute(2, 0, 1)


def t5() -> Model:
    """Layers are lists of layers themselves, scores are not scaled, and the decoder reads a text of another length.

    What attention to the own stack adds to its scores by the distance of two tokens is given, and not learned.
    """
    length = SEQUENCE + 2

    def make() -> Any:
        from transformers import T5Config, T5ForConditionalGeneration

        model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=WIDTH,
                d_kv=HEAD,
                d_ff=INNER,
                num_layers=LAYERS,
                num_heads=HEADS,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        )
        for stack in (model.encoder, model.decoder):
            bias = stack.block[0].layer[0].SelfAttention.relative_attention_bias
            bias.requires_grad_(False).weight.copy_(_T5_BIAS)
        return model

    def batch(number: int) -> dict[str, torch.Tensor]:
        read = torch.cat([tokens(number)["input_ids"], tokens(number + 100)["input_ids"]], dim=1)[:, :length]
        return {"input_ids": read, "labels": tokens(number)["labels"]}

    products = []
    for layer in range(LAYERS):
        for stack, rows, attentions in (
            ("encoder", (BATCH, length), {"SelfAttention": (length, False)}),
            (
                "decoder",
                (BATCH, SEQUENCE),
                {"SelfAttention": (SEQUENCE, True), "EncDecAttention": (length, False)},
            ),
        ):
            products += _t5_layer(stack, layer, rows, attentions)
    return Model(make, batch, [*products, linear("lm_head", WIDTH, VOCABULARY, tied=True)])


def _t5_layer(stack: str, layer: int, rows: Shape, attentions: dict[str, tuple[int, bool]]) -> list[Product]:
    """`attentions`: name → length of its keys, whether causal."""
    products, place = [], {"layer": layer, "stack": stack}
    for number, (name, (keys, causal)) in enumerate(attentions.items()):
        at = f"{stack}.block.{layer}.layer.{number}.{name}"
        inputs = tuple(f"{at}.{part}" for part in "qkv")
        for part, length in zip("qkvo", (rows[1], keys, keys, rows[1]), strict=True):
            products.append(linear(f"{at}.{part}", WIDTH, WIDTH, rows=(BATCH, length), **place))
        products.append(
            attention(
                at,
                queries=rows[1],
                keys=keys,
                causal=causal,
                scale=1.0,
                source=inputs,
                target=f"{at}.o",
                bias=_t5_bias(keys, both_ways=stack == "encoder") if name == "SelfAttention" else None,
                **place,
            )
        )
    dense = f"{stack}.block.{layer}.layer.{len(attentions)}.DenseReluDense"
    return [
        *products,
        linear(f"{dense}.wi", WIDTH, INNER, rows=rows, **place),
        linear(f"{dense}.wo", INNER, WIDTH, rows=rows, **place),
    ]


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
