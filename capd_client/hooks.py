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
from capd_client.integrations import find_sites, step_counters
from capd_client.integrations.linears import left_out
from capd_client.late_watch import LateWatch
from capd_client.naming import Place, place_modules
from capd_client.notices import Notices
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
        self._root: Optional[RootHook] = None
        self._root_handles: tuple[RemovableHandle, ...] = ()
        self._clock: Optional[Clock] = None
        self._watched: Optional[Watched] = None
        self._steering: Optional[Watches] = None
        self._late: Optional[LateWatch] = None

    @property
    def taps(self) -> list[Tap]:
        """Those that capture."""
        return [] if self._watched is None else self._watched.taps

    def attach_root(self, model: nn.Module, watched: Watched, sink: Sink) -> None:
        """Let the forwards of `model` begin micro-batches. First, so that it runs before the taps."""
        recompute.install()
        step_counters.install()
        self._watched, self._clock = watched, clock_of(sink.context)
        self._clock.before_forward = step_counters.look_again
        self._clock.add(watched.gate)
        self._root = RootHook(model, self._clock, sink, watched.settle)
        self._root_handles = (
            model.register_forward_pre_hook(self._root, prepend=True),
            model.register_forward_hook(RootEnd(self._root), always_call=True),
        )

    def follow(self, steering: Watches) -> None:
        """Let `capd ctl` change what is captured, now that everything is tapped."""
        if self._watched is not None:
            self._steering = steering
            steering.add(self._watched)

    def look_for_late_watch(self, model: nn.Module) -> None:
        """Have it said if graphs compiled before now keep the taps from seeing anything."""
        if self._root is not None and self._watched is not None and self._clock is not None:
            watched = self._watched
            self._late = LateWatch(model, self._root, watched.gate, self._clock, watched.taps)

    def remove(self) -> None:
        """Take every hook off again, also those waiting in a graph for its backward. May be called twice."""
        if self._late is not None:
            self._late.cancel()
        if self._watched is not None:
            if self._steering is not None:
                self._steering.discard(self._watched)
            if self._clock is not None:
                self._clock.discard(self._watched.gate)
                recompute.uninstall()
                step_counters.uninstall()
            self._watched.remove()
        if self._root is not None:
            self._root.remove()
        for handle in self._root_handles:
            handle.remove()
        self._root, self._root_handles, self._clock = None, (), None
        self._watched, self._steering, self._late = None, None, None


def watch(
    model: nn.Module,
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
        model: its forwards begin the micro-batches.
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
        _attach(sink, model, handle, plan, name=name or "")
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
    model: nn.Module,
    handle: WatchHandle,
    plan: _Plan,
    *,
    name: str = "",
    called: Optional[nn.Module] = None,
) -> None:
    """Put the hooks of `plan` on `model` and note them in `handle`.

    called: where nobody asked for this watch by name, the part of `model` whose forwards begin the micro-batches; then
    nothing is said of what it leaves out.
    """
    products = _products_of(model, name)
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
        plan.report("empty", _nothing_to_watch(model, plan, [place.module for _, place in products]))
        return
    gate = Gate(sink.context, plan.steps, micro_batches=plan.micro_batches, ranks=plan.ranks)
    watched = Watched(sink, gate, plan.tensors, plan.slices)
    handle.attach_root(model if called is None else called, watched, sink)
    for site, place in fresh:
        watched.attach(site, place)
    for site, place in products:
        if (site, place) not in chosen:
            watched.leave_out(site, place)
    if plan.ranks is None or sink.context.rank in plan.ranks:
        sink.prepare({parameter.device for parameter in model.parameters()})
    handle.look_for_late_watch(model)
    handle.follow(sink.steering)
    handle.modules = tuple(place.module for _, place in fresh)
    _notices.info(
        'watching %d of %d products of %s (%s): %s in steps "%s"%s',
        len(fresh), len(products), type(model).__name__, _counted(fresh), ", ".join(plan.told(fresh)), plan.steps.text,
        "" if plan.steps.text == "all" else '; widen it with steps="all", CAPD_STEPS or [when] steps in capd.toml',
    )  # fmt: skip
    others = left_out(model, (site.module for site, _ in products))
    if others:
        _notices.info("not captured, for they multiply in ways of their own: %s", ", ".join(others[:5]))


def _products_of(model: nn.Module, prefix: str) -> list[tuple[Site, Place]]:
    sites = find_sites(model)
    places = place_modules(model, list(sites), prefix=prefix)
    return [(site, places[name].of(site.suffix)) for name, of_module in sites.items() for site in of_module]


def _counted(products: list[tuple[Site, Place]]) -> str:
    """How many products of which sort."""
    counts = Counter(site.kind.layer_type for site, _ in products)
    return ", ".join(f"{count} {layer_type}" for layer_type, count in counts.items())


def _nothing_to_watch(model: nn.Module, plan: _Plan, names: list[str]) -> str:
    if not names:
        return f"{type(model).__name__} has no product that capd knows; use capd_client.capture() for its tensors"
    some = ", ".join(names[:3])
    return f"watch(select={list(plan.select)!r}) leaves none of {len(names)} products ({some}, ...)"
