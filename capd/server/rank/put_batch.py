"""The check of one PUT against the rank's definitions and arena, before any capture is taken."""

from __future__ import annotations

from collections.abc import Mapping

from capd.server.rank.arena import Arena
from capd.server.rank.checks import believes_row, descriptor_problem
from capd_client.errors import ProtocolError
from capd_client.protocol.messages import Define, Descriptor, Put
from capd_client.protocol.statistics_row import ROW_NBYTES

__all__ = ["Checked", "check_put", "problem_of"]

# A descriptor, its definition, and its error.
Checked = tuple[Descriptor, "Define | None", "str | None"]


def check_put(
    message: Put, keys: Mapping[int, Define], key_problems: Mapping[int, str], arena: Arena
) -> tuple[list[Checked], dict[int, bytes]]:
    """Check a batch. It asks the kernel about pages, so it runs before the rank's lock is taken.

    Args:
        message: The batch as received.
        keys: The rank's definitions on this connection, by key id.
        key_problems: The key ids that cannot be stored, and why.
        arena: The sender's arena.

    Returns:
        Each descriptor with its definition and its error; and the rank's statistics rows, by sequence.

    Raises:
        ProtocolError: The sequences of the batch do not ascend.
    """
    items: list[Checked] = []
    rows: dict[int, bytes] = {}
    previous = -1
    for item in message.items:
        if item.sequence <= previous:
            raise ProtocolError(f"sequence {item.sequence} follows {previous} in one batch")
        previous = item.sequence
        define = keys.get(item.key_id)
        problem = key_problems.get(item.key_id) or problem_of(item, define, arena)
        if problem is None and define is not None and item.row_offset is not None:
            row = bytes(arena.slice(item.row_offset, ROW_NBYTES))
            if believes_row(row, define.dtype, item.shape):
                rows[item.sequence] = row
            elif not item.payload:
                problem = f"the statistics row at {item.row_offset} contradicts the tensor, or itself"
        items.append((item, define, problem))
    return items, rows


def problem_of(item: Descriptor, define: Define | None, arena: Arena) -> str | None:
    """Return the error in a descriptor of `arena`, as the NACK's text; None: its bytes may be read."""
    problem = descriptor_problem(item, define, arena.nbytes)
    if problem is None and not arena.is_written(item.offset, item.nbytes):
        problem = f"not all of the {item.nbytes} bytes at offset {item.offset} were ever written"
    if problem is None and item.row_offset is not None and not arena.is_written(item.row_offset, ROW_NBYTES):
        problem = f"the statistics row at {item.row_offset} was never written"
    return problem
