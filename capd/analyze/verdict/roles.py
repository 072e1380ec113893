"""The role of a tensor in training: activations, weights and gradients need different things of a format."""

from __future__ import annotations

from capd_client.protocol.key import Key

__all__ = ["ROLES", "role_of"]

ROLES = ("activations", "weights", "gradients")
_PARAMETERS = ("weight", "bias")


def role_of(key: Key) -> str:
    """Return the role of a captured tensor, one of ROLES.

    `grad_…` and all tensors of a backward are gradients, because tensor_saver recorded dY as the `input` of a backward.
    A `weight` is a weight in the backward, too, and so are its parts, such as `weight.scale`. `attention_weights` are
    results of a softmax, so they are activations.
    """
    name = key.tensor_name.partition(".")[0]
    if name in _PARAMETERS:
        return "weights"
    return "gradients" if key.operation == "backward" or name.startswith("grad_") else "activations"
