"""The role of every tensor that capd_client captures, under watch and under tensor_saver's names."""

from __future__ import annotations

import pytest

from capd.analyze.verdict.roles import JUDGED, is_gradient, role_of
from capd_client.protocol.key import Key
from capd_client.protocol.kinds import KINDS, placement

WATCHED = sorted({name for kind in KINDS for name in kind.tensors})
SAVED = [
    ("forward", "input", "activations"),
    ("forward", "weight", "weights"),
    ("forward", "output", "activations"),
    ("backward", "input", "gradients"),
    ("backward", "weight", "weights"),
    ("backward", "output", "gradients"),
    ("backward", "grad_input", "gradients"),
    ("forward", "query", "activations"),
    ("forward", "key", "activations"),
    ("forward", "value", "activations"),
    ("forward", "attention_weights", "activations"),
    ("forward", "weight.scale", "weights"),
    ("forward", "bias", "weights"),
]


@pytest.mark.parametrize("name", WATCHED)
def test_every_tensor_of_watch_has_its_role(name: str) -> None:
    operation, phase = placement(name)
    role = role_of(Key(quant_type="bf16", rank=0, tensor_name=name, operation=operation, phase=phase))

    expected = "gradients" if name.startswith("grad_") else "weights" if name == "weight" else "activations"
    assert role == expected
    assert role in JUDGED


@pytest.mark.parametrize(("operation", "name", "role"), SAVED)
def test_the_names_of_tensor_saver_have_their_roles(operation: str, name: str, role: str) -> None:
    assert role_of(Key(quant_type="bf16", rank=0, tensor_name=name, operation=operation)) == role


@pytest.mark.parametrize("name", ["grad", "wgrad", "main_grad", "dY", "exp_avg", "hidden", "router.weight"])
def test_a_name_of_the_users_own_is_no_activation(name: str) -> None:
    role = role_of(Key(quant_type="bf16", rank=0, tensor_name=name))

    assert role == ("gradients" if is_gradient(name) else "other")
    assert is_gradient(name) == (name in ("grad", "wgrad", "main_grad", "dY"))
