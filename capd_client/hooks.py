"""`watch(model)`: puts taps on the matrix products of a model and takes them away again.

Nothing here raises into the job: what cannot be used is reported once through the logger, and the default is
used instead (CAPD_STRICT=1 raises). With capture off, `watch` returns at once and touches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional, Union

from torch import nn
from torch.utils.hooks import RemovableHandle

from capd_client import recompute
from capd_client.api import session
from capd_client.auto_watch import give_way
from capd_client.errors import ConfigError
from capd_client.gate import Gate
from capd_client.hook_objects import RootEnd, RootHook
from capd_client.integrations import step_counters
from capd_client.integrations.linears import left_out
from capd_client.late_watch import LateWatch
from capd_client.naming import Place
from capd_client.notices import Notices
from capd_client.placing import find_products
from capd_client.select import DEFAULT_TENSORS, TENSORS, Ranges, matches_any
from capd_client.sites import Site
from capd_client.slicing import Slice, parse_slices
from capd_client.steering import Watches
from capd_client.stepping import Clock, clock_of
from capd_client.taps import Settings, Sink, Tap
from capd_client.watched import Watched, is_tapped

__all__ = ["WatchHandle", "watch"]

_notices = Notices()


class WatchHandle:
    """What `watch` put on a model. `modules`: names of the tapped modules, as the keys carry them."""

    def __init__(self) -> None:
        self.modules: tuple[str, ...] = ()
        self._roots: list[RootHook] = []
        self._root_handles: list[RemovableHandle] = []
        self._clock: Optional[Clock] = None
        self._watched: Optional[Watched] = None
        self._steering: Optional[Watches] = None
        self._late: list[LateWatch] = []

    @property
    def taps(self) -> list[Tap]:
        """Those that capture."""
        return [] if self._watched is None else self._watched.taps

    def attach_roots(self, models: Sequence[nn.Module], watched: Watched, sink: Sink) -> None:
        """Let the forwards of the models begin micro-batches. First, so that it runs before the taps."""
        recompute.install()
        step_counters.install()
        self._watched, self._clock = watched, clock_of(sink.context)
        self._clock.before_forward = step_counters.look_again
        self._clock.add(watched.gate)
        for model in models:
            root = RootHook(model, self._clock, sink, watched.settle)
            self._roots.append(root)
            self._root_handles += [
                model.register_forward_pre_hook(root, prepend=True),
                model.register_forward_hook(RootEnd(root), always_call=True),
            ]

    def follow(self, steering: Watches) -> None:
        """Let `capd ctl` change what is captured, now that everything is tapped."""
        if self._watched is not None:
            self._steering = steering
            steering.add(self._watched)

    def look_for_late_watch(self, models: Sequence[nn.Module]) -> None:
        """Have it said if graphs compiled before now keep the taps from seeing anything."""
        watched, clock = self._watched, self._clock
        if watched is None or clock is None:
            return
        for model, root in zip(models, self._roots, strict=True):
            inside = set(model.modules())
            taps = [tap for tap in watched.taps if tap.module() in inside]
            if taps:
                self._late.append(LateWatch(model, root, watched.gate, clock, taps))

    def remove(self) -> None:
        """Take every hook off again, also those waiting in a graph for its backward. May be called twice."""
        for late in self._late:
            late.cancel()
        if self._watched is not None:
            if self._steering is not None:
                self._steering.discard(self._watched)
            if self._clock is not None:
                self._clock.discard(self._watched.gate)
                recompute.uninstall()
                step_counters.uninstall()
            self._watched.remove()
        for root in self._roots:
            root.remove()
        for handle in self._root_handles:
            handle.remove()
        self._clock, self._watched, self._steering = None, None, None
        self._roots, self._root_handles, self._late = [], [], []


def watch(
    model: Union[nn.Module, Sequence[nn.Module]],
    *,
    name: Optional[str] = None,
    steps: Optional[str] = None,
    tensors: Optional[Iterable[str]] = None,
    select: Union[str, Sequence[str], None] = None,
    slices: Union[str, Mapping[str, str], None] = None,
) -> WatchHandle:
    """Capture the operands of the matrix products of `model`: of a Linear X, W (once per step), Y and dY; of attention
    query, key, value, the output and its gradient.

    Call it on the model that the training loop calls, before or after wrapping, sharding or parallelising it. Only
    training forwards are captured, recomputes never.

    Args:
        model: its forwards begin the micro-batches. Or several: the chunks of a virtual pipeline, as Megatron's
            `get_model` returns them.
        name: put in front of the module names; tells several watched models apart.
        steps: iterations to capture, as in "0-2,100-:100" or "all". Default: CAPD_STEPS, else [when] steps
            in capd.toml, else "0".
        tensors: any of "input", "weight", "query", "key", "value", "output", "grad_output" (the default), and with
            "grad_" in front what the backward computes: "grad_input", "grad_weight", "grad_query", ...
        select: glob, or globs, over qualified module names without wrappers ("*.mlp.*").
        slices: the rows to record, as in "first:64", "stride:8" or "tokens:0-127" (capd_client.slicing): one for
            all but the weight and its gradient, or by tensor name, as in {"input": "first:64", "weight":
            "stride:8"}. Default: CAPD_SLICE, else slice in capd.toml, else whole tensors.

    Returns:
        A handle with `remove()`. Inert when capture is off, and where nothing could be attached.

    Raises:
        ConfigError: only with CAPD_STRICT=1, for an unknown tensor name, an unreadable range or slice, or a
            selection that matches nothing. Otherwise these are one warning each.
    """
    give_way()
    sink = session()
    if sink is None:
        return WatchHandle()
    handle = WatchHandle()
    try:
        plan = _Plan(sink.config, steps=steps, tensors=tensors, select=select, slices=slices)
        models = (model,) if isinstance(model, nn.Module) else tuple(model)
        _attach(sink, models, handle, plan, name=name or "")
    except ConfigError:
        handle.remove()
        raise
    except Exception as error:
        handle.remove()
        sink.drop_internal("watch", error)
    return handle


class _Plan:
    """What one `watch` captures: arguments checked, defaults filled in from the settings."""

    def __init__(
        self,
        config: Settings,
        *,
        steps: Optional[str] = None,
        tensors: Optional[Iterable[str]] = None,
        select: Union[str, Sequence[str], None] = None,
        slices: Union[str, Mapping[str, str], None] = None,
    ) -> None:
        self.strict = config.strict
        self.steps = Ranges(config.steps) if steps is None else self._ranges(str(steps), config.steps)
        self.micro_batches = _restricting(config.micro_batches)
        self.ranks = _restricting(config.ranks)
        self.tensors = self._chosen_tensors(DEFAULT_TENSORS if tensors is None else tensors)
        self.slices = self._parsed_slices(slices, config.slice or {})
        self.select = (select,) if isinstance(select, str) else tuple(select or ())

    def _ranges(self, text: str, default: str) -> Ranges:
        try:
            return Ranges(text)
        except ConfigError as error:
            self.report("steps", f'watch(steps=...): {error}; capturing steps "{default}"')
            return Ranges(default)

    def _parsed_slices(
        self, slices: Union[str, Mapping[str, str], None], default: Union[str, Mapping[str, str]]
    ) -> dict[str, Slice]:
        try:
            found = parse_slices(default if slices is None else slices)
        except (ConfigError, TypeError) as error:  # TypeError: not a text
            self.report(
                "slices", f"watch(slices=...): {error}; using the default, {default or 'whole tensors'}"
            )
            found = parse_slices(default)
        known = self._known_tensors("slices", found)
        return {name: take for name, take in found.items() if name in known}

    def _chosen_tensors(self, names: Iterable[str]) -> frozenset[str]:
        """The known ones; the default where names were given and none of them is known."""
        wanted = frozenset([names] if isinstance(names, str) else names)
        known = self._known_tensors("tensors", wanted)
        return frozenset(DEFAULT_TENSORS) if wanted and not known else known

    def _known_tensors(self, argument: str, names: Iterable[str]) -> frozenset[str]:
        wanted = frozenset([names] if isinstance(names, str) else names)
        unknown = wanted.difference(TENSORS)
        if unknown:
            listed = ", ".join(sorted(map(str, unknown)))
            self.report(
                argument,
                f"watch({argument}=...): no tensor is called {listed}; known: {', '.join(TENSORS)}",
            )
        return wanted.intersection(TENSORS)

    def told(self, products: list[tuple[Site, Place]]) -> list[str]:
        """The captured tensors of these products as the log names them."""
        of_products = self.tensors.intersection(name for site, _ in products for name in site.kind.tensors)
        return [
            f"{name} ({self.slices[name].text})" if name in self.slices else name
            for name in sorted(of_products)
        ]

    def report(self, reason: str, message: str) -> None:
        """Warn once, or raise ConfigError under CAPD_STRICT=1."""
        if self.strict:
            raise ConfigError(message)
        _notices.warn(reason, "%s", message)


def _restricting(text: str) -> Optional[Ranges]:
    return None if text.strip() == "all" else Ranges(text)


def _attach(
    sink: Sink,
    models: Sequence[nn.Module],
    handle: WatchHandle,
    plan: _Plan,
    *,
    name: str = "",
    called: Optional[nn.Module] = None,
) -> None:
    """Put the hooks of `plan` on the models and note them in `handle`.

    called: where nobody asked for this watch by name, the part of the one model whose forwards begin the
    micro-batches; then nothing is said of what it leaves out.
    """
    products = find_products(models, name)
    told = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
    chosen = [(s, p) for s, p in products if not plan.select or matches_any(p.module, plan.select)]
    fresh = [(site, place) for site, place in chosen if not is_tapped(site)]
    if len(fresh) < len(chosen) and called is None:
        plan.report(
            "twice",
            f"{len(chosen) - len(fresh)} modules are watched already; remove() that handle to change it",
        )
    if not fresh:
        if called is not None:
            return
        plan.report("empty", _nothing_to_watch(told, plan, [place.module for _, place in products]))
        return
    gate = Gate(sink.context, plan.steps, micro_batches=plan.micro_batches, ranks=plan.ranks)
    watched = Watched(sink, gate, plan.tensors, plan.slices)
    handle.attach_roots(models if called is None else (called,), watched, sink)
    for site, place in fresh:
        watched.attach(site, place)
    for site, place in products:
        if (site, place) not in chosen:
            watched.leave_out(site, place)
    if plan.ranks is None or sink.context.rank in plan.ranks:
        sink.prepare({parameter.device for model in models for parameter in model.parameters()})
    handle.look_for_late_watch(models)
    handle.follow(sink.steering)
    handle.modules = tuple(place.module for _, place in fresh)
    _say_what_lacks(plan, fresh)
    _notices.info(
        'watching %d of %d products of %s (%s): %s in steps "%s"%s',
        len(fresh), len(products), told, _counted(fresh), ", ".join(plan.told(fresh)), plan.steps.text,
        "" if plan.steps.text == "all" else '; widen it with steps="all", CAPD_STEPS or [when] steps in capd.toml',
    )  # fmt: skip
    of_products = frozenset(site.module for site, _ in products)
    others = [name for model in models for name in left_out(model, of_products)]
    if others:
        _notices.info("not captured, for they multiply in ways of their own: %s", ", ".join(others[:5]))


def _say_what_lacks(plan: _Plan, products: list[tuple[Site, Place]]) -> None:
    asked = Counter(lack for site, _ in products for lack in site.lacks if lack[0] in plan.tensors)
    for (tensor, reason), count in asked.items():
        _notices.warn(f"lacks {tensor}", "%s of %d products is not captured: %s", tensor, count, reason)


def _counted(products: list[tuple[Site, Place]]) -> str:
    """How many products of which sort."""
    counts = Counter(site.kind.layer_type for site, _ in products)
    return ", ".join(f"{count} {layer_type}" for layer_type, count in counts.items())


def _nothing_to_watch(told: str, plan: _Plan, names: list[str]) -> str:
    if not names:
        return (
            f"{told or 'nothing'} has no product that capd knows; use capd_client.capture() for its tensors"
        )
    some = ", ".join(names[:3])
    return f"watch(select={list(plan.select)!r}) leaves none of {len(names)} products ({some}, ...)"
