"""TransformerEngine itself on a GPU, where the package is at hand: hooks, and the inspection's quantised operands."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.kit.gpu.job import Job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="TransformerEngine is not installed"
)

MODULES = """
import transformer_engine.pytorch as te
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.core = te.LayerNormLinear(64, 192), te.DotProductAttention(4, 16)
        self.proj = te.Linear(64, 64)
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, 16)) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(self.core(q, k, v))
"""

TRAIN = """
torch.manual_seed(0)
model = Model().cuda().bfloat16()
BEFORE
capd_client.watch(model, steps="all")
for _ in range(2):
    with te.fp8_autocast(enabled=FP8):
        y = model(torch.randn(32, 2, 64, device="cuda", dtype=torch.bfloat16))
    y.float().square().sum().backward()
    AFTER
drained()
"""

INSPECT = """
import nvdlfw_inspect.api as debug_api
open("capture.yaml", "w").write('''
capture:
  enabled: True
  layers: {layer_name_regex_pattern: .*}
  transformer_engine:
    CapdCapture: {enabled: True, tensors: [activation, weight, output, gradient, dgrad, wgrad]}
''')
import transformer_engine.debug.features, os
features = os.path.dirname(transformer_engine.debug.features.__file__)
debug_api.initialize(config_file="capture.yaml", feature_dirs=[features, capd_client.te_features()], log_dir=".")
debug_api.infer_and_assign_layer_names(model)
"""


def script(fp8: bool, before: str = "", after: str = "") -> str:
    return MODULES + TRAIN.replace("FP8", str(fp8)).replace("BEFORE", before).replace("AFTER", after)


def test_hooks_see_linears_and_attention(job: Job) -> None:
    store = job.run(script(fp8=False))
    names = {(s.key.module, s.key.tensor_name): s for s in store.series}
    assert {n for m, n in names if m == "core"} == {"query", "key", "value", "output", "grad_output"}
    assert {n for m, n in names if m == "proj"} == {"input", "weight", "output", "grad_output"}
    x, w, y = (names["proj", n].torch(0).double() for n in ("input", "weight", "output"))
    assert torch.allclose(x @ w.T, y, rtol=1e-2, atol=1e-2)


def test_the_inspection_gives_payload_and_scales(job: Job) -> None:
    store = job.run(script(fp8=True, before=INSPECT, after="debug_api.step()"))
    parts = {s.key.tensor_name for s in store.series if s.key.module.endswith("proj")}
    assert {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"} <= parts
    assert any(name.startswith("input.") and "data" in name for name in parts)
    assert any(name.startswith("weight.") and "scale" in name for name in parts)
