"""How many products a watch says that it has: as many as a forward of the model runs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from capd_client.watching.watch import watch
from tests.kit.client.sink import MemorySink
from tests.kit.client.steering import steer

WIDTH = 8


class Crossing(nn.Module):
    """An attention of sizes of its own: each of its operands has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, kdim=4, vdim=6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x[..., :4], x[..., :6], need_weights=False)[0]  # type: ignore[no-any-return]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True), 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x, x[:, 1:])  # type: ignore[no-any-return]


MODELS = {encoder: 10, Decoder: 18, Crossing: 5}


@pytest.mark.parametrize(("make", "count"), MODELS.items())
def test_the_line_counts_the_products_that_a_forward_runs(
    sink: MemorySink, caplog: pytest.LogCaptureFixture, make: Callable[[], nn.Module], count: int
) -> None:
    model = make()

    with caplog.at_level(logging.INFO, logger="capd_client"):
        watch(model)
    model(torch.randn(2, 3, WIDTH)).sum().backward()

    ran = {(capture.key.module, capture.key.component) for capture in sink.captured}
    assert len(ran) == count
    assert f"watching {count} of {count} products" in caplog.text
    told = re.search(r"\((\d+) FA, (\d+) linear\)|\((\d+) linear, (\d+) FA\)", caplog.text)
    assert told is not None
    assert sum(int(number) for number in told.groups() if number) == count

    steer(sink)
    torch.optim.SGD(model.parameters()).step()
    model(torch.randn(2, 3, WIDTH))
    assert sink.steering.answer is not None
    assert sink.steering.answer.modules == count


def test_parts_of_a_weight_count_where_only_they_are_chosen(
    sink: MemorySink, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="capd_client"):
        watch(encoder(), select="*.in_proj_k*")

    assert "watching 4 of 10 products" in caplog.text
