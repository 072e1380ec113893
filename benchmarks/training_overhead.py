"""What capturing every Linear costs a training step: nothing, empty hooks, bare copies, capd, synchronous saving.

    python benchmarks/training_overhead.py [--rounds 6] [--json FILE]

A 4-layer transformer, d_model 512, 8 heads, batch 1 x 128 tokens, fp32, 17 Linears, one thread. Captured are
input, output, grad_output and grad_input of every Linear: 68 tensors, 35.1 MB per step. The variants take turns
in blocks within one process. Every measured step is captured whole; between two of them capd's daemon
may catch up, so that nothing is dropped, and what the client does meanwhile counts as CPU of the step.

CPU x: CPU time of the training process (all threads) per step, relative to no capture. wall x: the same for the
time from the start of a step to its end.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from common import daemon, machine, report, spread
from torch import Tensor, nn

import capd_client

TENSORS = ("input", "output", "grad_output", "grad_input")
VOCABULARY, D_MODEL, HEADS, LAYERS, SEQUENCE = 1000, 512, 8, 4, 128
RING_NBYTES = 256 << 20
ARENA_NBYTES = 256 << 20
DRAIN_TIMEOUT_S = 60.0


class Block(nn.Module):
    """Pre-norm transformer block with four Linears."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D_MODEL), nn.LayerNorm(D_MODEL)
        self.qkv, self.out = nn.Linear(D_MODEL, 3 * D_MODEL), nn.Linear(D_MODEL, D_MODEL)
        self.up, self.down = nn.Linear(D_MODEL, 4 * D_MODEL), nn.Linear(4 * D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Token ids in, mean cross entropy of the next token out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D_MODEL)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(D_MODEL, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class Handle(Protocol):
    """What a variant leaves on the model."""

    def remove(self) -> None: ...


class PlainHooks:
    """Hands X, Y, dY and dX of every Linear to `take`, by the cheapest hooks that get them right."""

    def __init__(self, model: nn.Module, take: Callable[[Tensor], None] | None) -> None:
        self._handles = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                before, after = self._hooks(take or (lambda tensor: None))
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after))

    @staticmethod
    def _hooks(take: Callable[[Tensor], None]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def gradient(tensor: Tensor) -> None:
            take(tensor)

        def before(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            take(args[0])
            alias = args[0].view_as(args[0])
            alias.register_hook(gradient)
            return (alias,)

        def after(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
            take(output)
            output.register_hook(gradient)

        return before, after

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Ring:
    """A preallocated buffer that is written round and round: the least any snapshot can cost."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = torch.zeros(nbytes, dtype=torch.uint8)
        self._offset = 0

    def copy(self, tensor: Tensor) -> None:
        if self._offset + tensor.nbytes > self._buffer.nbytes:
            self._offset = 0
        slot = self._buffer[self._offset : self._offset + tensor.nbytes]
        slot.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._offset += tensor.nbytes + (-tensor.nbytes) % 64


class SynchronousSaver:
    """The predecessor's way: bring the tensor to the host, four statistics, one torch.save per tensor."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def save(self, tensor: Tensor) -> None:
        host = tensor.detach().cpu()
        statistics_ = {
            "min": host.min().item(), "max": host.max().item(), "mean": host.mean().item(), "std": host.std().item()
        }  # fmt: skip
        self._count += 1
        torch.save({"tensor": host, "statistics": statistics_}, self._directory / f"{self._count}.pt")

    def clear(self) -> None:
        """Delete what was saved; the disk is not what is measured."""
        for path in self._directory.iterdir():
            path.unlink()


class Variant:
    """One way to capture. `settle` runs after each step: its CPU time counts, its wall time does not."""

    def __init__(
        self,
        name: str,
        attach: Callable[[nn.Module], Handle | None],
        *,
        settle: Callable[[], Any] = lambda: None,
        after_block: Callable[[], Any] = lambda: None,
    ) -> None:
        self.name = name
        self.attach = attach
        self.settle = settle
        self.after_block = after_block
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def run_block(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, steps: int
    ) -> None:
        """One step to warm up, then `steps` measured ones."""
        handle = self.attach(model)
        for index in range(steps + 1):
            cpu, wall = time.process_time(), time.perf_counter()
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            wall = time.perf_counter() - wall
            self.settle()
            if index:
                self.wall_s.append(wall)
                self.cpu_s.append(time.process_time() - cpu)
        if handle is not None:
            handle.remove()
        self.after_block()


def wait_until_acknowledged() -> None:
    """Let the daemon catch up. Looks rarely: this waiting is the benchmark's own, and its CPU is counted."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while capd_client.counters()["in_flight"] and time.monotonic() < deadline:
        time.sleep(0.02)


def make_variants(scratch: Path) -> list[Variant]:
    """All variants; the first one is what the others are compared with."""
    ring, saver = Ring(RING_NBYTES), SynchronousSaver(scratch)
    return [
        Variant("none", lambda model: None),
        Variant("empty hooks", lambda model: PlainHooks(model, None)),
        Variant("bare copies", lambda model: PlainHooks(model, ring.copy)),
        Variant(
            "capd",
            lambda model: capd_client.watch(model, steps="all", tensors=TENSORS),
            settle=wait_until_acknowledged,
        ),
        Variant(
            "synchronous",
            lambda model: PlainHooks(model, saver.save),
            after_block=saver.clear,
        ),
    ]


def measure(variants: list[Variant], rounds: int, steps: int) -> None:
    """Interleave the variants: every round runs a block of each, in an order that rotates."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    for index in range(rounds):
        turn = index % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            variant.run_block(model, optimizer, tokens, steps)


def summarise(variants: list[Variant]) -> dict[str, dict[str, float]]:
    """Per variant: medians in ms, ratios to the first variant, and the extra time per step."""
    base_cpu, base_wall = (statistics.median(t) for t in (variants[0].cpu_s, variants[0].wall_s))
    rows = {}
    for variant in variants:
        cpu, wall = statistics.median(variant.cpu_s), statistics.median(variant.wall_s)
        rows[variant.name] = {
            "cpu_ms": cpu * 1e3, "wall_ms": wall * 1e3, "cpu_ratio": cpu / base_cpu, "wall_ratio": wall / base_wall,
            "extra_cpu_ms": (cpu - base_cpu) * 1e3, "extra_wall_ms": (wall - base_wall) * 1e3,
        }  # fmt: skip
    return rows


def show(result: dict[str, Any], variants: list[Variant]) -> None:
    """Print the table and the verdicts."""
    print(
        f"{'variant':12s} {'CPU x':>6s} {'wall x':>7s} {'extra CPU':>10s} {'extra wall':>11s}   CPU s per step"
    )
    for variant in variants:
        row = result["variants"][variant.name]
        print(
            f"{variant.name:12s} {row['cpu_ratio']:6.2f} {row['wall_ratio']:7.2f} {row['extra_cpu_ms']:7.1f} ms "
            f"{row['extra_wall_ms']:8.1f} ms   {spread(variant.cpu_s)}"
        )
    counters, rows = result["counters"], result["variants"]
    dropped = sum(counters["dropped"].values())
    print(f"capd: {counters['offered']} offered, {counters['committed']} committed, {dropped} dropped")
    print(
        f"daemon: {result['daemon_peak_anonymous_mib']:.0f} MiB anonymous at most, {result['daemon_cpu_s']:.1f} s CPU"
    )
    for name, bound, value in (
        ("capd, CPU x", 1.25, rows["capd"]["cpu_ratio"]),
        ("capd above bare copies, CPU x", 0.06, rows["capd"]["cpu_ratio"] - rows["bare copies"]["cpu_ratio"]),
        ("capd's extra CPU / synchronous", 0.5, rows["capd"]["extra_cpu_ms"] / rows["synchronous"]["extra_cpu_ms"]),
        ("capd's extra wall / synchronous", 0.5, rows["capd"]["extra_wall_ms"] / rows["synchronous"]["extra_wall_ms"]),
    ):  # fmt: skip
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each variant in each round")
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scratch = Path(tempfile.mkdtemp(prefix="capd-benchmark-", dir=args.directory))
    with daemon(args.directory, arena_nbytes=ARENA_NBYTES) as running:
        variants = make_variants(scratch)
        measure(variants, args.rounds, args.steps)
        counters = capd_client.counters()
        capd_client.close()
    shutil.rmtree(scratch)
    result = {
        "machine": machine(),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "variants": summarise(variants),
        "counters": counters,
        "daemon_peak_anonymous_mib": running.peak_anonymous_mib,
        "daemon_cpu_s": running.cpu_s,
    }
    show(result, variants)
    report(result, args.json)


if __name__ == "__main__":
    main()
