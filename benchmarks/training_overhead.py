"""The cost of capturing every Linear for a training step, by variants from no capture to synchronous saving.

    python benchmarks/training_overhead.py [--client transformers] [--live] [--rounds 6] [--json FILE]

The model is a 4-layer transformer, d_model 512, 8 heads, batch 1 x 128 tokens, fp32, 17 Linears, one thread.
Captured are input, output, grad_output and grad_input of every Linear: 68 tensors, 35.1 MB per step. With `--client
transformers` the model is a Llama of that size, and its attention is captured, too (transformers_client.py).

The variants are no capture, empty hooks, bare copies, capd, and synchronous saving. They take turns in blocks within
one process. Every measured step is captured whole. Between two steps capd's daemon may catch up, so that nothing is
dropped. The client's work in this time counts as CPU of the step.

With `--live` there are two other variants: capture alone, and capture beside the lab, rules, `capd top` and two open
pages (live/viewers.py).

"CPU x" is the CPU time of the training process (all threads) per step, relative to no capture. "wall x" is the same
for the time from the start of a step to its end. Both are compared round by round, and the medians of the ratios are
printed, because the speed of a virtual machine changes by the minute.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import capd_client
from benchmarks.kit import idle_hooks
from benchmarks.kit.common import daemon, keep_freed_memory, machine, report, spread
from benchmarks.kit.plain_capture import PlainHooks, Ring, SynchronousSaver

TENSORS = ("input", "output", "grad_output", "grad_input")
VOCABULARY, D_MODEL, HEADS, LAYERS, SEQUENCE = 1000, 512, 8, 4, 128
RING_NBYTES = 256 << 20
ARENA_NBYTES = 256 << 20
DRAIN_TIMEOUT_S = 60.0


class Block(nn.Module):
    """A pre-norm transformer block with four Linears."""

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
    """A transformer: token ids in, mean cross entropy of the next token out."""

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
    """The hooks of a variant on the model."""

    def remove(self) -> None: ...


class Variant:
    """A way to capture. `settle` runs after each step: its CPU time counts, its wall time does not."""

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
        self._steps = 1

    def run_block(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, steps: int
    ) -> None:
        """Run a round: one step to warm up, then `steps` measured ones."""
        handle = self.attach(model)
        self._steps = steps
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

    def rounds(self, measured: list[float]) -> list[float]:
        """Return the median of each round, of `cpu_s` or `wall_s`."""
        return [
            statistics.median(measured[at : at + self._steps]) for at in range(0, len(measured), self._steps)
        ]

    def above(self, other: Variant, base: Variant) -> tuple[float, float]:
        """Return the extra cost over `other`, as a share of `base`: of CPU and of wall time, medians of all rounds."""
        return (
            _above(self.rounds(self.cpu_s), other.rounds(other.cpu_s), base.rounds(base.cpu_s)),
            _above(self.rounds(self.wall_s), other.rounds(other.wall_s), base.rounds(base.wall_s)),
        )


def _above(these: list[float], others: list[float], base: list[float]) -> float:
    return statistics.median((a - b) / c for a, b, c in zip(these, others, base, strict=True))


def wait_until_acknowledged() -> None:
    """Let the daemon catch up. It checks rarely, because the CPU of this wait is counted."""
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while capd_client.counters()["in_flight"] and time.monotonic() < deadline:
        time.sleep(0.02)


@dataclass(frozen=True)
class Client:
    """A training client: a model, its captured tensors, and the cheapest correct hooks for them."""

    make: Callable[[], nn.Module]
    tensors: tuple[str, ...]
    components: list[str]
    plain: Callable[[nn.Module, Callable[[Tensor], None] | None], Handle]
    # The other variants, each with the cost that capd may add to it.
    bounds: tuple[tuple[str, float], ...]
    # Returns a model with so little computation that the cost of hooks is visible.
    make_idle: Callable[[], nn.Module]
    idle_tokens: Tensor


class Both:
    """Two handles as one."""

    def __init__(self, *handles: Handle) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def own_client() -> Client:
    def chain() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(32)))

    return Client(
        Transformer, TENSORS, ["linear"], PlainHooks, (("bare copies", 0.06),), chain, torch.randn(4, 8)
    )


def transformers_client() -> Client:
    # This import is slow.
    from benchmarks.kit import transformers_client as llama

    def plain(model: nn.Module, take: Callable[[Tensor], None] | None) -> Handle:
        return Both(PlainHooks(model, take), llama.AttentionHooks(take or (lambda tensor: None)))

    def make() -> nn.Module:
        return llama.Llama(VOCABULARY, D_MODEL, HEADS, LAYERS)

    return Client(
        make,
        llama.TENSORS,
        ["linear", "FA"],
        plain,
        # The first bound is without the copying of the bytes, the second with it.
        (("bare copies", 0.08), ("empty hooks", 0.08)),
        llama.make_idle,
        torch.randint(64, (1, 4)),
    )


def make_variants(client: Client, scratch: Path) -> list[Variant]:
    """Return all variants. The others are compared with the first one."""
    ring, saver = Ring(RING_NBYTES), SynchronousSaver(scratch)
    return [
        Variant("none", lambda model: None),
        Variant("empty hooks", lambda model: client.plain(model, None)),
        Variant("bare copies", lambda model: client.plain(model, ring.copy)),
        Variant(
            "capd",
            lambda model: capd_client.watch(
                model, steps="all", tensors=client.tensors, select={"components": client.components}
            ),
            settle=wait_until_acknowledged,
        ),
        Variant(
            "synchronous",
            lambda model: client.plain(model, saver.save),
            after_block=saver.clear,
        ),
    ]


def measure(client: Client, variants: list[Variant], rounds: int, steps: int) -> None:
    """Interleave the variants: every round runs a block of each, in an order that rotates."""
    torch.manual_seed(0)
    model = client.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = torch.randint(VOCABULARY, (1, SEQUENCE + 1))
    for index in range(rounds):
        turn = index % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            variant.run_block(model, optimizer, tokens, steps)


def summarise(variants: list[Variant]) -> dict[str, dict[str, float]]:
    """Return, per variant, medians in ms and ratios to the first variant, with the resulting medians in ms."""
    base = variants[0]
    base_cpu, base_wall = statistics.median(base.cpu_s) * 1e3, statistics.median(base.wall_s) * 1e3
    rows = {}
    for variant in variants:
        cpu, wall = variant.above(base, base)
        rows[variant.name] = {
            "cpu_ms": statistics.median(variant.cpu_s) * 1e3, "wall_ms": statistics.median(variant.wall_s) * 1e3,
            "cpu_ratio": 1 + cpu, "wall_ratio": 1 + wall,
            "extra_cpu_ms": cpu * base_cpu, "extra_wall_ms": wall * base_wall,
        }  # fmt: skip
    return rows


def show(result: dict[str, Any], variants: list[Variant], client: Client) -> None:
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
    counters, rows, by_name = result["counters"], result["variants"], {one.name: one for one in variants}
    dropped = sum(counters["dropped"].values())
    print(f"capd: {counters['offered']} offered, {counters['committed']} committed, {dropped} dropped")
    print(
        f"daemon: {result['daemon_peak_anonymous_mib']:.0f} MiB anonymous at most, "
        f"{result['daemon_cpu_s']:.1f} s CPU"
    )
    above = result["idle_us"]["capd above empty hooks, per hook"]
    for name, bound, value in (
        ("where the step is not captured, us per hook above an empty one", 1.0, above),
        ("capd, CPU x", 1.25, rows["capd"]["cpu_ratio"]),
        *(
            (f"capd above {other}, CPU x", allowed, by_name["capd"].above(by_name[other], variants[0])[0])
            for other, allowed in client.bounds
        ),
        ("capd's extra CPU / synchronous", 0.5, rows["capd"]["extra_cpu_ms"] / rows["synchronous"]["extra_cpu_ms"]),
        ("capd's extra wall / synchronous", 0.5, rows["capd"]["extra_wall_ms"] / rows["synchronous"]["extra_wall_ms"]),
    ):  # fmt: skip
        print(f"{name}: {value:.3f}, bound {bound}: {'met' if value <= bound else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--client", choices=("own", "transformers"), default="own")
    parser.add_argument(
        "--live",
        action="store_true",
        help="compare capture beside lab, rules, top and pages with capture alone",
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each variant in each round")
    parser.add_argument(
        "--directory", type=Path, help="where the temporary store goes (default: the system's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.live:
        # It imports this module.
        from benchmarks.live import viewers

        viewers.run(args.rounds, args.steps, args.directory, args.json)
        return
    torch.set_num_threads(1)
    keep_freed_memory()
    client = transformers_client() if args.client == "transformers" else own_client()
    scratch = Path(tempfile.mkdtemp(prefix="capd-benchmark-", dir=args.directory))
    with daemon(args.directory, arena_nbytes=ARENA_NBYTES) as running:
        variants = make_variants(client, scratch)
        measure(client, variants, args.rounds, args.steps)
        idle = idle_hooks.measure(client.make_idle, client.idle_tokens, rounds=args.rounds)
        counters = capd_client.counters()
        capd_client.close()
    shutil.rmtree(scratch)
    result = {
        "machine": machine(),
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "client": args.client,
        "variants": summarise(variants),
        "idle_us": idle,
        "counters": counters,
        "daemon_peak_anonymous_mib": running.peak_anonymous_mib,
        "daemon_cpu_s": running.cpu_s,
    }
    show(result, variants, client)
    report(result, args.json)


if __name__ == "__main__":
    main()
