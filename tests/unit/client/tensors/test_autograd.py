"""Which tensor's gradient is that of a product's output."""

from __future__ import annotations

import torch

from capd_client.tensors.autograd import hang, product_of


def test_a_view_of_another_order_gets_its_own_gradient() -> None:
    """Attention returns [batch, tokens, heads, width], which is how it computed [batch, heads, tokens, width]."""
    gradients = []
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    computed = (x * 2).transpose(1, 2)  # the kernel's result, as the kernel's own dimensions
    computed = torch.empty_strided(computed.shape, computed.stride()).copy_(computed)
    output = computed.transpose(1, 2).contiguous()
    assert output._base is not None

    hang(product_of(output), gradients.append)
    weights = torch.randn(2, 3, 4, 5)
    (output * weights).sum().backward()

    assert torch.equal(gradients[0].reshape(output.shape), weights)
