"""The process that reads records for the page: it measures single ones in number formats, and reads stored errors.

It is a process of its own because this needs torch or the spool, and with it more memory than the page may have.
It runs while somebody looks at such errors and ends after that.
One line of JSON on stdin is a request, one on stdout its answer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from capd.errors import CapdError
from capd.store.disk.layout import node_directory
from capd.store.read.elements import ReadTools
from capd.store.read.node import NodeView
from capd.store.read.series import Series, tensor_of
from capd.web.reading.errors import errors_by_iteration

__all__ = ["FORMATS", "main", "measured"]

FORMATS = "fp8,mxfp8,mxfp4,nvfp4,hifp8"
"""The formats of the page, as `capd compare --formats` names them."""
_NICE = 9


def measured(run: Path, node: str, path: str, number: int) -> dict[str, float | str | None]:
    """Return the SQNR of one record in each format, in dB. No format is in it that does not take the record.

    Raises:
        CapdError: There is no such record, or an element cannot be read exactly.
    """
    import torch

    from capd.analyze.distribution import distribution_of
    from capd.analyze.format_choice import choices
    from capd.analyze.measure import measure_each
    from capd.strict_json import json_number

    torch.set_num_threads(1)
    view = NodeView(run, node_directory(run, node), only=path)
    if path not in view.series:
        raise CapdError(f"{run} has no series {path} of node {node!r} any more")
    series = Series(view, view.series[path], ReadTools())
    bits = series.elements(number)
    found, _ = measure_each(
        tensor_of(bits, series.dtype), distribution_of(bits, series.dtype), choices(FORMATS)
    )
    return {label: json_number(errors.sqnr_db) for label, errors in found.items()}


def main() -> None:
    """Answer requests until stdin ends."""
    os.nice(_NICE)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    run = Path(request["run"])
    try:
        if "errors" in request:
            return errors_by_iteration(run, [(node, path) for node, path in request["errors"]])
        return {"sqnr": measured(run, request["node"], request["path"], int(request["number"]))}
    except Exception as error:
        # This is the outermost loop of the process. The page shows the reason at the tensor.
        return {"problem": f"{error}" if isinstance(error, CapdError) else f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
