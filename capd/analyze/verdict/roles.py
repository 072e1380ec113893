"""The role of a tensor in training: activations, weights and gradients need different things of a format."""

from __future__ import annotations

import re

from capd_client.protocol.key import Key
from capd_client.protocol.kinds import KINDS

__all__ = ["JUDGED", "ROLES", "is_gradient", "role_of"]

JUDGED = ("activations", "weights", "gradients")
"""The roles that sentences are about."""
ROLES = (*JUDGED, "other")
"""All roles. A tensor with a name of the user's own may be anything, such as a state of the optimizer."""

_PARAMETERS = ("weight", "bias")
_ACTIVATIONS = frozenset({"attention_weights", *(name for kind in KINDS for name in kind.forward_tensors)})
# dY, dX, dW, dQ, as papers write them.
_DERIVATIVE = re.compile(r"d[A-Z]")


def is_gradient(tensor_name: object) -> bool:
    """Return whether a tensor holds gradients, by its name, such as `grad_output`, `main_grad`, `wgrad` or `dY`.

    Gradients shrink by orders of magnitude during training, so figures draw them logarithmically.
    """
    name = str(tensor_name)
    return "grad" in name.lower() or _DERIVATIVE.match(name) is not None


def role_of(key: Key) -> str:
    """Return the role of a captured tensor, one of ROLES.

    All tensors of a backward are gradients, because tensor_saver recorded dY as the `input` of a backward. A `weight`
    is a weight in the backward, too, and so are its parts, such as `weight.scale`. `attention_weights` are results of
    a softmax, so they are activations.
    """
    name = key.tensor_name.partition(".")[0]
    if name in _PARAMETERS:
        return "weights"
    if is_gradient(key.tensor_name) or key.operation == "backward":
        return "gradients"
    return "activations" if name in _ACTIVATIONS else "other"
