"""torch.compile on a GPU, also by CUDA graphs: what compiled code computes is captured, and it computes the same."""

from __future__ import annotations

import pytest

from tests.kit.gpu.job import Job, same_bits

STEPS = 8

# The model gives its hidden tensor back as well: what compiled code computed can be compared with that.
TRAINED = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 32)

    def forward(self, x):
        hidden = self.up(x)
        return hidden, self.down(torch.relu(hidden))

def inputs(step):
    generator = torch.Generator("cuda").manual_seed(100 + step)
    return torch.randn(16, 64, device="cuda", generator=generator)

def train(watched):
    torch.manual_seed(9)
    model = Model().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if watched:
        capd_client.watch(model, steps="all", tensors=("input", "output", "grad_output"))
    model = MAKE(model)
    losses = []
    for step in range(8):
        x = inputs(step)
        torch.compiler.cudagraph_mark_step_begin()
        hidden, output = model(x)
        gradients = []
        output.register_hook(lambda gradient: gradients.append(gradient.detach().clone()))
        loss = output.square().mean() + hidden.mean()
        loss.backward()
        if watched:
            hold(x, "up", "input", step)
            hold(hidden, "up", "output", step)
            hold(torch.relu(hidden), "down", "input", step)
            hold(output, "down", "output", step)
            hold(gradients[0], "down", "grad_output", step)
        losses.append(float(loss.detach()).hex())
        optimizer.step()
        optimizer.zero_grad()
    return losses

alone = train(False)
torch.compiler.reset()
ready()
assert train(True) == alone
assert not drained()["dropped"], capd_client.counters()
save()
"""
COMPILED = {
    "eager": "lambda model: model",
    "default": "torch.compile",
    "reduce-overhead": 'lambda model: torch.compile(model, mode="reduce-overhead")',
}


@pytest.mark.parametrize("mode", COMPILED)
def test_a_compiled_model_is_captured_as_it_computes(job: Job, mode: str) -> None:
    """Operators of capd part the graphs: what runs in a CUDA graph could not be seen, and would end the job."""
    held = job.run(TRAINED.replace("MAKE", f"({COMPILED[mode]})")).held
    found = job.by_module()
    assert len(held) == 5 * STEPS
    assert found.keys() == held.keys() | {("up", "grad_output", step) for step in range(STEPS)}
    for key, tensor in held.items():
        assert same_bits(found[key], tensor), key
