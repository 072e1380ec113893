"""A job that captures quantised tensors, and writes down the values that their definitions give them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import capd_client
from tests.integration.quantised import te_cases, torchao_cases


def main(directory: Path) -> None:
    expected = {}
    for name, build in {**torchao_cases.CASES, **te_cases.CASES}.items():
        for micro_batch in range(2):
            tensor, values = build()
            capd_client.capture(tensor, tensor_name=name, iteration=0, micro_batch=micro_batch)
        expected[name] = values.contiguous()
    for name, (refused, _) in te_cases.REFUSED.items():
        capd_client.capture(refused, tensor_name=name, iteration=0, micro_batch=0)
    tensor = torchao_cases.CASES["mx_e4m3_turned"]()[0]
    capd_client.capture(tensor, tensor_name="labelled", quant_type="mine", iteration=0, micro_batch=0)
    one_row = torchao_cases.one_row_turned(torchao_cases.FP4)[0]
    capd_client.capture(one_row, tensor_name="one_row", iteration=0, micro_batch=0)
    torch.save(expected, directory / "expected.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
