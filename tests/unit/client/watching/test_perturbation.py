"""CAPD_PERTURB: the first numbers are changed by rounding alone, alike everywhere, once, and until the watch ends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from capd_client.config.settings import ClientConfig, load_config
from capd_client.errors import ConfigError
from capd_client.watching.perturbation import Perturbation, perturb
from capd_client.watching.watch import watch
from tests.kit.client.models import MLP
from tests.kit.client.sink import MemorySink


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(tokens))
        return out


def test_inputs_are_changed_by_eps_with_either_sign_and_captured_so(sink: MemorySink) -> None:
    sink.config = ClientConfig(steps="all", perturb="0.001:3")
    model, x = MLP(), torch.rand(40, 6) + 0.5
    handle = watch(model)
    model(x)
    seen = next(one for one in sink.captured if one.key.tensor_name == "input")
    ratio = seen.value / x
    assert torch.allclose((ratio - 1).abs(), torch.full_like(ratio, 1e-3), atol=1e-6)
    assert 60 < int((ratio > 1).sum()) < 180
    assert {one.attributes["perturb"] for one in sink.captured} == {"0.001:3"}
    handle.remove()
    sink.captured.clear()
    watch(model).remove()
    assert model._forward_pre_hooks == {}


def test_the_output_of_an_embedding_is_changed_and_not_the_tokens(sink: MemorySink) -> None:
    sink.config = ClientConfig(steps="all", perturb="0.001")
    model, tokens = Words(), torch.arange(5)
    handle = watch(model)
    model(tokens)
    seen = next(one for one in sink.captured if one.key.tensor_name == "input" and one.value.shape == (5, 6))
    table = model.table.weight.detach()
    assert not torch.equal(seen.value, table)
    assert torch.allclose(seen.value, table, rtol=2e-3)
    handle.remove()
    assert torch.equal(model.table(tokens), table)


def test_nothing_is_changed_and_said_without_the_setting(sink: MemorySink) -> None:
    model, x = MLP(), torch.rand(4, 6)
    watch(model)
    model(x)
    seen = next(one for one in sink.captured if one.key.tensor_name == "input")
    assert torch.equal(seen.value, x)
    assert "perturb" not in seen.attributes


def test_signs_depend_on_seed_and_call_alone() -> None:
    change = Perturbation.of("1e-7:3")
    assert change == (1e-7, 3)
    assert torch.equal(change.signs((4, 5), 0), Perturbation(1e-7, 3).signs((4, 5), 0))
    assert not torch.equal(change.signs((40,), 0), change.signs((40,), 1))
    assert not torch.equal(change.signs((40,), 0), Perturbation(1e-7, 4).signs((40,), 0))


def test_a_model_is_perturbed_once() -> None:
    model = nn.Linear(2, 2)
    ends = perturb([model], "1e-3")
    assert perturb([model], "1e-3") == []
    for end in ends:
        end()
    assert len(perturb([model], "1e-3")) == 2


@pytest.mark.parametrize(
    "text", ["0", "-1e-7", "0.2", "nan", "inf", "x", "1e-7:", "1e-7:-1", "1e-7:x", "1:2:3"]
)
def test_what_is_no_perturbation_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no perturbation; write EPS or EPS:SEED"):
        load_config({"CAPD_PERTURB": text, "CAPD_STRICT": "1"})


def test_a_perturbation_is_read() -> None:
    assert load_config({"CAPD_PERTURB": " 1e-7:3 ", "CAPD_STRICT": "1"}).perturb == "1e-7:3"
    assert load_config({}).perturb is None
