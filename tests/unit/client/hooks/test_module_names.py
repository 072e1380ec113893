"""Module names, layers and stacks: independent of wrappers, and right on real architectures."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from capd_client.hooks.module_names import Place, clean_name, place_modules
from capd_client.watching.watch import watch
from tests.kit.client.models import Blocks
from tests.kit.client.sink import MemorySink


@pytest.mark.parametrize(
    ("qualified", "clean"),
    [
        ("fc1", "fc1"),
        ("module.fc1", "fc1"),
        ("_orig_mod.module.layers.0.q", "layers.0.q"),
        (
            "module.module.model._fsdp_wrapped_module.layers.3._checkpoint_wrapped_module.mlp",
            "model.layers.3.mlp",
        ),
        ("base_model.model.model.layers.0.q_proj.lora_A.default", "model.layers.0.q_proj.lora_A.default"),
        ("encoder.module.fc", "encoder.module.fc"),
        ("module", ""),
        ("", ""),
    ],
)
def test_wrapper_parts_leave_the_name(qualified: str, clean: str) -> None:
    assert clean_name(qualified) == clean


def tree(path: str) -> nn.Module:
    """A model with one Linear at `path`; digits lie in a ModuleList, or where `seq` says so in a Sequential."""
    child: nn.Module = nn.Linear(2, 2)
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        parent: nn.Module
        if parts[depth].isdigit():
            number = int(parts[depth])
            items = [nn.Identity() for _ in range(number)] + [child]
            parent = nn.Sequential(*items) if parts[depth - 1].startswith("seq") else nn.ModuleList(items)
        else:
            parent = nn.Module()
            parent.add_module(parts[depth], child)
        child = parent
    return child


@pytest.mark.parametrize(
    ("path", "layer", "stack"),
    [
        ("layers.2.fc", 2, ""),
        ("encoder.block.1.attention", 1, "encoder"),
        ("encoder.block.1.layer.0.attention", 1, "encoder"),
        ("vision_model.encoder.layers.3.mlp", 3, "vision_model.encoder"),
        ("model.layers.1.experts.5.up", 1, "model"),
        ("module._orig_mod.decoder.layers.4.fc", 4, "decoder"),
        ("seq_head.3.fc", None, ""),
        ("lm_head", None, ""),
    ],
)
def test_layer_is_the_first_number_in_a_module_list_and_stack_its_owner(
    path: str, layer: int | None, stack: str
) -> None:
    places = place_modules(tree(path), [path])

    assert places[path] == Place(clean_name(path), layer, stack)


def test_a_layer_list_that_is_no_module_list_is_known_by_its_name() -> None:
    model = nn.Module()
    model.trunk = nn.Module()
    model.trunk.blocks = nn.Sequential(nn.Identity(), nn.Linear(2, 2))

    assert place_modules(model, ["trunk.blocks.1"])["trunk.blocks.1"] == Place("trunk.blocks.1", 1, "trunk")


@pytest.mark.parametrize(("attribute", "value", "layer"), [("layer_number", 13, 12), ("layer_idx", 7, 7)])
def test_a_number_that_the_framework_declares_wins(attribute: str, value: int, layer: int) -> None:
    model = tree("layers.0.fc")
    setattr(model.get_submodule("layers.0"), attribute, value)

    assert place_modules(model, ["layers.0.fc"])["layers.0.fc"].layer == layer


def test_the_layers_of_a_pipeline_stage_are_named_as_in_the_whole_model() -> None:
    stage = nn.Module()
    stage.decoder = nn.Module()
    stage.decoder.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for number, layer in enumerate(stage.decoder.layers, start=5):  # 1-based, as Megatron counts
        layer.layer_number = number

    places = place_modules(stage, ["decoder.layers.0", "decoder.layers.1"])

    assert [place.module for place in places.values()] == ["decoder.layers.4", "decoder.layers.5"]
    assert [place.layer for place in places.values()] == [4, 5]


def test_names_that_would_collide_without_their_wrapper_parts_keep_them() -> None:
    model = nn.Module()
    model.fc = nn.Linear(2, 2)
    model.module = nn.Module()
    model.module.fc = nn.Linear(2, 2)

    places = place_modules(model, ["fc", "module.fc"])

    assert {place.module for place in places.values()} == {"fc", "module.fc"}


def test_a_name_for_the_model_goes_in_front() -> None:
    place = place_modules(tree("encoder.layers.0.fc"), ["encoder.layers.0.fc"], prefix="actor")

    assert place["encoder.layers.0.fc"] == Place("actor.encoder.layers.0.fc", 0, "actor.encoder")
    assert place_modules(nn.Linear(2, 2), [""], prefix="actor")[""].module == "actor"
    assert place_modules(nn.Linear(2, 2), [""])[""].module == "Linear"


class Wrapper(nn.Module):
    """What DistributedDataParallel looks like from outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


@pytest.mark.parametrize("before", [True, False])
def test_keys_are_the_same_whether_watched_before_or_after_wrapping(sink: MemorySink, before: bool) -> None:
    model = Blocks()
    wrapped = Wrapper(model)
    watch(model if before else wrapped)

    wrapped(torch.randn(2, 6))
    wrapped(torch.randn(2, 6))

    keys = {(c.key.module, c.key.layer) for c in sink.captured}
    assert keys == {
        ("inlet", None), ("layers.0.0", 0), ("layers.0.2", 0), ("layers.1.0", 1), ("layers.1.2", 1)
    }  # fmt: skip
    assert {c.moment.micro_batch for c in sink.captured} == {0, 1}


def test_transformers_models_are_named_and_captured_whole(sink: MemorySink) -> None:
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )
    )  # fmt: skip
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    )
    tokens = torch.arange(8).view(1, 8)
    watch(llama, name="llama")
    watch(t5, name="t5")

    llama(input_ids=tokens, labels=tokens).loss.backward()
    t5(input_ids=tokens, decoder_input_ids=tokens, labels=tokens).loss.backward()

    where = {(c.key.module, c.key.layer, c.key.stack) for c in sink.captured}
    assert ("llama.model.layers.1.mlp.up_proj", 1, "llama.model") in where
    assert ("llama.lm_head", None, "") in where
    assert ("t5.encoder.block.1.layer.0.SelfAttention.q", 1, "t5.encoder") in where
    assert ("t5.decoder.block.1.layer.0.SelfAttention.q", 1, "t5.decoder") in where
    linears = sum(isinstance(m, nn.Linear) for model in (llama, t5) for m in model.modules())
    captured = Counter(c.key.tensor_name for c in sink.captured if c.key.layer_type == "linear")
    assert set(captured.values()) == {linears}
