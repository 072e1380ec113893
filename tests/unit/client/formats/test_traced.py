"""Formats under fake tensors and compilers: shapes come out right, and eager values are right afterwards."""

from __future__ import annotations

import sys

import pytest

from capd_client.formats import FORMATS
from tests.kit import forking

# In a process of its own: what is looked at are the tables of a process that has made none yet.
FAKE_FIRST = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from capd_client.formats import FORMATS, encode, decode, qdq

real = {dtype: torch.linspace(-9, 9, 256).reshape(4, 64).to(dtype) for dtype in (torch.bfloat16, torch.float32)}
for name in FORMATS:
    for x in real.values():
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            found = qdq(fake, name)
            assert (found.shape, found.dtype) == (x.shape, x.dtype), name
            assert decode(encode(fake, name)).shape == x.shape, name
        found = qdq(x, name)
        assert type(found) is torch.Tensor and bool((found - x).abs().max() < 2), name
        assert torch.equal(decode(encode(x, name)).to(x.dtype), found), name
print("done")
"""

COMPILED_FIRST = """
import sys
import warnings
import torch
from capd_client.formats import qdq

warnings.filterwarnings("error", message=".*lru_cache")
x = torch.linspace(-9, 9, 256).reshape(4, 64).bfloat16()
compiled = torch.compile(lambda x: qdq(x, sys.argv[1]), backend="aot_eager", fullgraph=True)(x)
assert torch.equal(compiled, qdq(x, sys.argv[1]))
print("done")
"""


def run(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = forking.run(command, capture_output=True, text=True, timeout=110, imports=forking.TRAINING)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_after_fake_tensors_real_ones_are_as_ever() -> None:
    assert run(FAKE_FIRST) == "done\n"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "nvfp4" else pytest.mark.slow) for name in FORMATS],
)
def test_compiled_and_eager_give_the_same(name: str) -> None:
    assert run(COMPILED_FIRST, name) == "done\n"
