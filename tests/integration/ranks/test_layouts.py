"""Tensors that do not lie in C order, through a real daemon: the store has the tensor, for plain readers too."""

from __future__ import annotations

import pytest
import torch
import zarr

import capd
from capd_client.config.settings import ClientConfig
from capd_client.protocol.key import Key, Moment
from capd_client.session.session import Session
from tests.kit.processes import Daemon
from tests.kit.tiers import rows

SHAPES = [
    (2, 3, 5, 4),
    (1, 8, 128, 64),
    (2, 8, 128, 64),
    (4, 16, 600, 64),
]  # 480 B, 256 KiB, 512 KiB, 9.4 MiB in fp32
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]
PERMUTATIONS = [(0, 2, 1, 3), (3, 1, 0, 2)]


def made(shape: tuple[int, ...], dtype: torch.dtype, axes: tuple[int, ...]) -> torch.Tensor:
    """A tensor of this shape whose memory has the axes in another order."""
    lies = torch.randn([shape[axis] for axis in axes], generator=torch.Generator().manual_seed(5)) * 100
    back = sorted(range(len(axes)), key=lambda axis: axes[axis])
    return lies.to(dtype).permute(back)


@pytest.fixture
def session(daemon: Daemon) -> Session:
    config = ClientConfig(endpoint=str(daemon.socket), run_id="run", arena_bytes=256 << 20, strict=True)
    return Session(config, environ={})


@pytest.mark.parametrize("cast_to", rows([None, torch.float16], [torch.float16]))
def test_the_store_has_them_in_c_order(daemon: Daemon, session: Session, cast_to: torch.dtype | None) -> None:
    expected: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        for shape in SHAPES:
            for axes in PERMUTATIONS:
                tensor = made(shape, dtype, axes)
                assert not tensor.is_contiguous()
                name = f"{dtype}{shape}{axes}"
                expected[name] = tensor if cast_to is None else tensor.to(cast_to)
                key = Key(quant_type="q", rank=0, tensor_name=name)
                for iteration in range(2):
                    session.offer(tensor, key, Moment(iteration), cast_to=cast_to)
    assert session.flush(60)
    assert session.close(30)
    daemon.stop()

    store = capd.open(daemon.store / "run.zarr")
    for name, tensor in expected.items():
        (series,) = store.find(tensor_name=name)
        reference = tensor.contiguous()
        for record in range(2):
            found = series.torch(record)
            assert found.dtype == reference.dtype
            assert torch.equal(found.view(torch.uint8), reference.view(torch.uint8))
        if tensor.dtype is torch.float32:
            plain = zarr.open_array(daemon.store / "run.zarr" / series.path / "data", mode="r")
            assert (plain[1] == reference.numpy()).all()
        stats = series.records[0].stats
        assert stats.count == tensor.numel()
        assert stats.absmax == tensor.double().abs().max().item()


def test_a_part_of_such_a_tensor(daemon: Daemon, session: Session) -> None:
    heads = made((2, 8, 128, 64), torch.float32, (0, 2, 1, 3))
    for tensor in (heads[1], heads[:, 3], heads[:, :, 5:90]):
        key = Key(quant_type="q", rank=0, tensor_name=str(tuple(tensor.shape)))
        session.offer(tensor, key, Moment())
    assert session.close(30)
    daemon.stop()

    store = capd.open(daemon.store / "run.zarr")
    for tensor in (heads[1], heads[:, 3], heads[:, :, 5:90]):
        (series,) = store.find(tensor_name=str(tuple(tensor.shape)))
        assert torch.equal(series.torch(0), tensor)
