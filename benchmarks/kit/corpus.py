"""The corpus: tensors of a real, small language model, on which codecs and writers are measured.

    python benchmarks/kit/corpus.py [--dir DIR] [--quick]

It trains the model of `corpus_model` (a few minutes of one core) and runs one forward and backward. The operands and
results of the matrix products are kept as .npy files of stored bits, with a manifest. The other benchmarks call
`ensure`, which makes the corpus once. The same text and the same torch always make the same corpus.

The roles are "activation", "gradient", "weight" and "weight_gradient" of the layers in TAPPED (weights: of all
layers), and "repeated". "repeated" has the tensors that layer 0 computes from the embedding alone. With a vocabulary
of bytes their rows repeat exactly, which flatters every codec, so they are separate. A tensor that equals an earlier
one bit for bit is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Entry", "default_directory", "ensure", "load"]

VERSION = 1
MANIFEST = "manifest.json"
TAPPED = (1, 3)
FULL = {
    "width": 512, "hidden": 1408, "heads": 8, "layers": 4, "sequence": 512, "sequences": 4,
    "training_sequences": 2, "steps": 200, "text_nbytes": 16 << 20,
}  # fmt: skip
QUICK = {
    "width": 64, "hidden": 192, "heads": 2, "layers": 2, "sequence": 64, "sequences": 4,
    "training_sequences": 1, "steps": 2, "text_nbytes": 1 << 20,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor.

    `dtype` is torch's name for the meaning of the bits. `shape` and `file` are those of the stored bits.
    """

    name: str
    role: str
    dtype: str
    layer: int
    shape: tuple[int, ...]
    sha256: str
    file: Path

    def bits(self) -> NDArray[np.generic]:
        """Return the stored bits: uint16 for bfloat16, uint8 for 8-bit formats, or else the native dtype."""
        return np.load(self.file)


def default_directory(*, quick: bool = False) -> Path:
    """Return the default directory of the corpus."""
    return Path.home() / ".cache" / "capd" / f"corpus-{VERSION}{'-quick' if quick else ''}"


def load(directory: Path) -> list[Entry]:
    """Return the corpus in `directory`, in the order it was made. Raises OSError if there is none."""
    rows = json.loads((directory / MANIFEST).read_text())["tensors"]
    return [Entry(**{**row, "shape": tuple(row["shape"]), "file": directory / row["file"]}) for row in rows]


def ensure(directory: Path | None, *, quick: bool) -> list[Entry]:
    """Load the corpus. If it does not exist, make it first, in a separate process."""
    place = directory or default_directory(quick=quick)
    if not (place / MANIFEST).exists():
        print(f"making the corpus in {place}, once; this takes some minutes", file=sys.stderr)
        command = [sys.executable, __file__, "--dir", str(place), *(["--quick"] if quick else [])]
        subprocess.run(command, check=True)
    return load(place)


def make(directory: Path, *, quick: bool) -> dict[str, Any]:
    """Train, tap, quantise and write.

    Returns the manifest, which is written last and marks the corpus as complete.
    """
    import torch

    from benchmarks.kit.corpus_model import Size, make_text, train

    size = Size(**QUICK if quick else FULL)
    text = make_text(size.text_nbytes)
    model, losses = train(text, size)
    directory.mkdir(parents=True, exist_ok=True)
    writer = _Writer(directory)
    for name, role, layer, dtype, bits in _tensors(model, text, size):
        writer.add(name, role, layer, dtype, bits)
    manifest = {
        "version": VERSION, "size": asdict(size), "torch": torch.__version__, "losses": losses,
        "text_sha256": hashlib.sha256(text).hexdigest(), "tensors": writer.rows,
    }  # fmt: skip
    temporary = directory / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1) + "\n")
    temporary.rename(directory / MANIFEST)
    return manifest


class _Writer:
    """A writer of one .npy file per tensor whose bytes are new."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: set[tuple[str, str]] = set()
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, role: str, layer: int, dtype: str, bits: NDArray[np.generic]) -> None:
        digest = hashlib.sha256(bits.tobytes()).hexdigest()
        if (dtype, digest) in self._seen:
            return
        self._seen.add((dtype, digest))
        file = f"{dtype}.{name}.npy"
        np.save(self._directory / file, bits)
        self.rows.append(
            {
                "name": name, "role": role, "dtype": dtype, "layer": layer, "shape": list(bits.shape),
                "sha256": digest, "file": file,
            }
        )  # fmt: skip


Row = tuple[str, str, int, str, NDArray[np.generic]]


def _tensors(model: Any, text: bytes, size: Any) -> Iterator[Row]:
    """Yield (name, role, layer, dtype, stored bits) of everything in the corpus."""
    import torch

    from benchmarks.kit.corpus_model import capture

    for dtype in (torch.bfloat16, torch.float32):
        for name, tensor in capture(model, text, size, dtype):
            role, layer = _role(name), int(name.partition(".")[0])
            if role is None or (dtype == torch.float32 and not _kept_wide(role, layer, size.layers)):
                continue
            view = torch.uint16 if dtype == torch.bfloat16 else dtype
            bits = tensor.contiguous().view(view).numpy()
            yield name, role, layer, str(dtype).removeprefix("torch."), bits
            if dtype == torch.bfloat16 and role != "repeated":
                yield from _quantised(name, role, layer, tensor)


def _role(name: str) -> str | None:
    """Return the role of a tap. None if it is not kept."""
    layer, module, last = name.split(".")
    if last == "weight":
        return "weight"
    if last == "grad_weight":
        return "weight_gradient"
    if int(layer) in TAPPED:
        return "gradient" if last.startswith("grad_") else "activation"
    return "repeated" if layer == "0" and module in "qkv" and last in ("input", "output") else None


def _kept_wide(role: str, layer: int, layers: int) -> bool:
    """Whether a float32 tensor is kept. For activations and gradients, the last layer's are enough."""
    return layer == layers - 1 if role in ("activation", "gradient") else layer in TAPPED


def _quantised(name: str, role: str, layer: int, tensor: Tensor) -> Iterator[Row]:
    import torch

    from benchmarks.kit.corpus_formats import fp8, mx

    tensor = tensor.contiguous()
    if role == "gradient":
        yield name, role, layer, "float8_e5m2", fp8(tensor, torch.float8_e5m2).numpy()
    yield name, role, layer, "float8_e4m3fn", fp8(tensor, torch.float8_e4m3fn).numpy()
    for dtype in ("float8_e4m3fn", "float4_e2m1fn_x2"):
        payload, scales = mx(tensor, dtype)
        form = "mxfp8" if dtype == "float8_e4m3fn" else "mxfp4"
        yield f"{name}.{form}", role, layer, dtype, payload.numpy()
        yield f"{name}.{form}.scales", role, layer, "float8_e8m0fnu", scales.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where the corpus goes (default: ~/.cache/capd)")
    parser.add_argument("--quick", action="store_true", help="a tiny one, to try the benchmarks with")
    args = parser.parse_args()
    directory = args.dir or default_directory(quick=args.quick)
    manifest = make(directory, quick=args.quick)
    sizes: dict[tuple[str, str], int] = {}
    for entry in load(directory):
        key = (entry.dtype, entry.role)
        sizes[key] = sizes.get(key, 0) + entry.bits().nbytes
    print(f"{directory}: loss {manifest['losses'][0]:.2f} to {manifest['losses'][-1]:.2f}")
    for (dtype, role), nbytes in sorted(sizes.items()):
        print(f"  {dtype:18s}{role:18s}{nbytes / (1 << 20):8.1f} MiB")


if __name__ == "__main__":
    main()
