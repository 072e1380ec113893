"""Rows of scripts that run their model before they train it: to count, to compile, to give lazy modules a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tests.integration.three_ways.three_ways_rows import Losses, Row, loop, square, words
from tests.kit.models import plain_models as models

if TYPE_CHECKING:
    from tests.integration.three_ways.three_ways_job import Script


class Lazy(nn.Module):
    """Linears that learn the width of their input by the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.LazyLinear(models.HIDDEN), nn.LazyLinear(models.WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())  # type: ignore[no-any-return]


def lazy(script: Script) -> Losses:
    """A dry run gives the weights their shapes, so that there is something to optimise and to watch."""
    model = Lazy()
    square(model, 3)
    script.watch(model)
    return loop(script, model, square)


def flops(script: Script) -> Losses:
    """What a step costs is counted with a forward and a backward, before the model is watched."""
    from torch.utils.flop_counter import FlopCounterMode

    model = models.Decoder()
    with FlopCounterMode(display=False) as counter:
        words(model, 3).backward()
    assert counter.get_total_flops() > 0
    model.zero_grad()
    script.watch(model)
    return loop(script, model, words)


def flops_watched(script: Script) -> Losses:
    """The same of a model that is watched already."""
    from torch.utils.flop_counter import FlopCounterMode

    model = models.Decoder()
    script.watch(model)
    with FlopCounterMode(display=False) as counter:
        words(model, 3).backward()
    assert counter.get_total_flops() > 0
    model.zero_grad()
    return loop(script, model, words)


def fake(script: Script) -> Losses:
    """Memory is estimated with tensors that hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = models.Decoder()
    script.watch(model)
    with FakeTensorMode(allow_non_fake_inputs=True):
        words(model, 3)
    return loop(script, model, words)


def exported(script: Script) -> Losses:
    """The graph is looked at before the training."""
    model = models.Decoder()
    script.watch(model)
    tokens = torch.zeros(models.BATCH, models.SEQUENCE, dtype=torch.long)
    assert len(list(torch.export.export(model, (tokens,)).graph.nodes)) > 1
    return loop(script, model, words)


def warm_up(script: Script) -> Losses:
    """A compiled model is called once, so that the first step does not wait for the compiler."""
    model = models.Decoder()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        words(compiled, 3)
    script.watch(model)
    return loop(script, compiled, words)


ROWS: dict[str, Row] = {
    "lazy": Row(lazy),
    "flops": Row(flops),
    "flops_watched": Row(flops_watched),
    "fake": Row(fake),
    "exported": Row(exported),
    "warm_up": Row(warm_up),
}
