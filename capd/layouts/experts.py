"""Experts of two layouts: tokens that were routed differently, and rows whose order depends on the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capd.layouts.views import Values

__all__ = ["joined_rows", "matched_rows", "rerouted_tokens"]

# A table of distances of all rows with each other.
_MOST_ROWS = 2048


def rerouted_tokens(found: Values, reference: Values, choices: int) -> int:
    """Return the number of tokens whose experts are others.

    Args:
        found: The router's logits [..., experts].
        reference: Those of the reference.
        choices: The experts of each token. A token's experts are those of its largest logits.
    """
    experts = reference.shape[-1]
    if choices >= experts:
        return 0
    ours, theirs = (
        np.sort(np.argsort(-values.reshape(-1, experts), axis=-1, kind="stable")[:, :choices], axis=-1)
        for values in (reference, found)
    )
    return int((ours != theirs).any(axis=-1).sum())


def matched_rows(found: Values, reference: Values) -> Values | None:
    """Return the rows of `found` in the order of the rows of `reference` to which they are nearest.

    Returns:
        The rows; None if the shapes differ, if there are more than 2048 rows, or if two rows are nearest to one.
    """
    if found.shape != reference.shape or found.ndim != 2 or len(found) > _MOST_ROWS:
        return None
    order = [int(np.argmin(np.square(found - row).sum(axis=-1))) for row in reference]
    return found[order] if len({*order}) == len(order) else None


def joined_rows(parts: Sequence[Values]) -> Values:
    """Return the rows of several tensors of one expert as one tensor."""
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])
