"""The oracle of what there is: the exact records of a run and their shapes, from the job's configuration alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.kit.algebra import Call, Captures, Record

Shape = tuple[int, ...]

LINEAR = ("input", "weight", "output", "grad_output")
ATTENTION = ("query", "key", "value", "output", "grad_output")
COMPONENTS = {"linear": "linear", "attention": "FA"}


def placement(tensor_name: str) -> tuple[str, str]:
    """The operation and phase in a tensor's key."""
    if tensor_name.startswith("grad_"):
        return "backward", "pre" if tensor_name == "grad_output" else "post"
    return "forward", "post" if tensor_name == "output" else "pre"


class Expected:
    """Records that a run must have, added product by product."""

    def __init__(self, *, steps: Iterable[int], micro_batches: int = 1, ranks: Iterable[int] = (0,)) -> None:
        self._steps = tuple(steps)
        self._micro_batches = micro_batches
        self._ranks = tuple(ranks)
        self.records: Counter[Record] = Counter()
        self.shapes: dict[tuple[str, str, str], Shape] = {}  # (module, layer_type, tensor name) →
        self.layers: dict[str, tuple[int | None, str]] = {}  # module → layer and stack

    def linear(
        self,
        module: str,
        rows: Sequence[int] | None,
        inputs: int,
        outputs: int,
        *,
        calls: int = 1,
        tensors: Iterable[str] = LINEAR,
        transposed: bool = False,
        computed: bool = False,
        at: tuple[int | None, str] = (None, ""),
        ranks: Iterable[int] | None = None,
    ) -> None:
        """A linear of `calls` calls per micro-batch.

        `rows`: the shape of X without its last axis; None: not checked. `computed`: every call has a weight of its own.
        `at`: layer and stack.
        """
        weight = (inputs, outputs) if transposed else (outputs, inputs)
        shapes: dict[str, Shape] = {"weight": weight, "grad_weight": weight}
        if rows is not None:
            shapes |= dict.fromkeys(("input", "grad_input"), (*rows, inputs))
            shapes |= dict.fromkeys(("output", "grad_output"), (*rows, outputs))
        once = () if computed else ("weight", "grad_weight")
        self._add(module, "linear", tensors, shapes, calls, at, ranks, once)

    def attention(
        self,
        module: str,
        shapes: dict[str, Shape] | None = None,
        *,
        calls: int = 1,
        tensors: Iterable[str] = ATTENTION,
        at: tuple[int | None, str] = (None, ""),
        ranks: Iterable[int] | None = None,
    ) -> None:
        """An attention; `shapes` of query, key, value and output, where they are to be checked."""
        known = dict(shapes or {})
        known |= {f"grad_{name}": shape for name, shape in known.items()}
        self._add(module, "attention", tensors, known, calls, at, ranks)

    def parameters(self, module: str, **shapes: Shape) -> None:
        """What a linear keeps once per step, as in `weight=(8, 4)`; dots as double underscores."""
        named = {name.replace("__", "."): shape for name, shape in shapes.items()}
        self._add(module, "linear", named, named, 1, self.layers.get(module, (None, "")), None, list(named))

    def _add(
        self,
        module: str,
        layer_type: str,
        tensors: Iterable[str],
        shapes: dict[str, Shape],
        calls: int,
        at: tuple[int | None, str],
        ranks: Iterable[int] | None,
        once: Sequence[str] = (),
    ) -> None:
        self.layers[module] = at
        for name in tensors:
            if name in shapes:
                self.shapes[module, layer_type, name] = shapes[name]
            micro_batches = 1 if name in once and name.startswith("weight") else self._micro_batches
            for call in (
                Call(rank, module, layer_type, step, micro_batch, number)
                for rank in (self._ranks if ranks is None else ranks)
                for step in self._steps
                for micro_batch in range(micro_batches)
                for number in range(1 if name in once else calls)
            ):
                self.records[Record(call, placement(name)[0], name)] += 1

    def check(self, captures: Captures) -> None:
        """Fail unless the run has exactly these records, each under a right key and of the right shape."""
        missing, surplus = self.records - captures.records, captures.records - self.records
        assert not missing + surplus, _told(missing, surplus)
        for (call, operation, name), key, tensor, _ in captures.entries:
            shape = self.shapes.get((call.module, call.layer_type, name))
            assert shape is None or tuple(tensor.shape) == shape, (call, name, tensor.shape, shape)
            assert (operation, key.phase) == placement(name), key
            assert key.component == COMPONENTS[call.layer_type], key
            assert (key.layer, key.stack) == self.layers[call.module], key


def _told(missing: Counter[Record], surplus: Counter[Record]) -> str:
    def some(records: Counter[Record]) -> str:
        return "".join(f"\n  {record}" for record in sorted(records, key=str)[:10])

    return (
        f"{missing.total()} records are missing, {surplus.total()} too many;"
        f" missing:{some(missing)}\ntoo many:{some(surplus)}"
    )
