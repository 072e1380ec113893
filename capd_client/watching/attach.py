"""Attaches a watch to the modules of a model, and removes it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Optional, Union

from torch import nn

from capd_client.config.watch_arguments import WatchPlan
from capd_client.errors import ConfigError
from capd_client.hooks import copies
from capd_client.hooks.module_hooks import RootEnd, RootHook
from capd_client.hooks.sink import Sink
from capd_client.hooks.sites import Site
from capd_client.hooks.tap import Tap
from capd_client.integrations.counters import install
from capd_client.process.log import RateLimitedLog
from capd_client.rules.problems import met_by, problems_of
from capd_client.rules.report import in_words, rank_left_out, rank_problems
from capd_client.rules.resolve import Resolved, Wanted, resolve, run_together
from capd_client.steps import checkpointing
from capd_client.steps.clock import clock_of
from capd_client.steps.shared_rules import shared_rules_of
from capd_client.steps.steering import Watches
from capd_client.watching import graphed_callables
from capd_client.watching.find import find_products, left_out, may_be_a_stage
from capd_client.watching.late_watch import LateWatch
from capd_client.watching.perturbation import perturb
from capd_client.watching.watched import Watched, is_tapped, target_of

__all__ = ["WatchHandle", "attach", "attached"]

_SHOWN = 5

_notices = RateLimitedLog()


class WatchHandle:
    """The hooks that one `watch` put on a model.

    Attributes:
        modules: The names of the tapped modules, as in the keys.
    """

    def __init__(self) -> None:
        self.modules: tuple[str, ...] = ()
        self._what = ""
        self._watched: Optional[Watched] = None
        # The calls that undo the watch, last one first.
        self._undo = ExitStack()

    def __repr__(self) -> str:
        return f"<watching {self._what if self._watched is not None else 'nothing'}>"

    @property
    def taps(self) -> list[Tap]:
        """Return the taps that capture."""
        return [] if self._watched is None else self._watched.taps

    def attach_roots(self, models: Sequence[nn.Module], watched: Watched, sink: Sink) -> list[RootHook]:
        """Make the forwards of the models begin micro-batches. Call it before any tap, so its hooks run first."""
        undo, clock = self._undo.callback, clock_of(sink.context)
        for part in (copies, checkpointing, graphed_callables, install):
            part.install()
            undo(part.uninstall)
        self._watched = watched
        clock.add(watched.gate)
        undo(clock.discard, watched.gate)
        roots = []
        for model in models:
            root = RootHook(model, clock, sink, before=install.look_again, begun=watched.settle)
            roots.append(root)
            undo(root.remove)
            undo(model.register_forward_pre_hook(root, prepend=True).remove)
            undo(model.register_forward_hook(RootEnd(root), always_call=True).remove)
        undo(watched.remove)
        return roots

    def perturb(self, models: Sequence[nn.Module], text: str) -> None:
        """Change the first numbers of the models. Call it before any tap, so that taps see the changed ones."""
        for end in perturb(models, text):
            self._undo.callback(end)
        _notices.warn(
            "perturb", "CAPD_PERTURB=%s: the job computes with perturbed inputs, to measure rounding", text
        )

    def follow(self, steering: Watches, watched: Watched, modules: Sequence[str], what: str) -> None:
        """Let `capd ctl` change the captured tensors. Call it after everything is tapped.

        Args:
            steering: Passes the orders of `capd ctl` to the watches.
            watched: The watch.
            modules: The names of the tapped modules.
            what: The captured tensors, in words.
        """
        self.modules, self._what = tuple(modules), what
        steering.add(watched)
        self._undo.callback(steering.discard, watched)

    def look_for_late_watch(
        self, models: Sequence[nn.Module], roots: Sequence[RootHook], watched: Watched
    ) -> None:
        """Warn later if the taps miss calls in graphs that were compiled before the watch."""
        for model, root in zip(models, roots, strict=True):
            inside = set(model.modules())
            taps = [tap for tap in watched.taps if tap.module() in inside]
            if taps:
                self._undo.callback(LateWatch(model, root, watched.gate, taps).cancel)

    def remove(self) -> None:
        """Remove every hook, also hooks that wait for the backward of a graph. May be called twice."""
        self._watched = None
        self._undo.close()


def attached(
    sink: Sink,
    model: Union[nn.Module, Sequence[nn.Module]],
    what: str,
    *,
    name: Optional[str],
    **choice: Any,
) -> WatchHandle:
    """Call `attach` for a public call, and count errors instead of raising them.

    Args:
        sink: Receives the captures and the errors.
        model: One model, or several.
        what: The name of the public call, for the log.
        name: The prefix of the module names.
        choice: The arguments of WatchPlan.

    Returns:
        The handle; inert after an error.

    Raises:
        ConfigError: An argument is unusable. Only with CAPD_STRICT=1.
    """
    handle = WatchHandle()
    try:
        models = (model,) if isinstance(model, nn.Module) else tuple(model)
        attach(sink, models, handle, WatchPlan(sink.config, **choice), name=name or "")
    except ConfigError:
        handle.remove()
        raise
    except Exception as error:
        handle.remove()
        sink.drop_internal(what, error)
    return handle


def attach(
    sink: Sink,
    models: Sequence[nn.Module],
    handle: WatchHandle,
    plan: WatchPlan,
    *,
    name: str = "",
    roots: Optional[Sequence[nn.Module]] = None,
) -> None:
    """Put the hooks of `plan` on the models and note them in `handle`.

    Args:
        sink: Receives the captures.
        models: The models.
        handle: Removes the hooks later.
        plan: The rules.
        name: The prefix of the module names.
        roots: The modules whose forwards begin the micro-batches. Default: the models. They are given for models that
            the job itself does not watch. Nothing is then reported about models without products, or about products
            that are already watched.
    """
    products = find_products(models, name)
    resolved = resolve(plan.rules, [target_of(site, place) for site, place in products])
    found = [(*product, wanted) for product, wanted in zip(products, resolved.wanted, strict=True)]
    chosen = [product for product in found if product[2]]
    fresh = [product for product in chosen if not is_tapped(product[0])]
    model_names = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
    whole = roots is not None
    if roots is None or (products and len(fresh) == len(chosen)):
        whole = (
            _report_problems(sink, model_names, plan, resolved, len(chosen) - len(fresh), asked=not whole)
            or whole
        )
    if not products or (whole and not fresh):
        return
    watched = Watched(sink, plan.rules, plan.default)
    hooks = handle.attach_roots(models if roots is None else roots, watched, sink)
    if sink.config.perturb is not None:
        handle.perturb(models, sink.config.perturb)
    for site, place, wanted in fresh:
        watched.attach(site, place, wanted)
    for site, place, wanted in found:
        if not wanted:
            watched.leave_out(site, place)
    if any(rule.when.on(sink.context.rank) for rule in plan.rules):
        sink.prepare({parameter.device for model in models for parameter in model.parameters()})
    if fresh:
        handle.look_for_late_watch(models, hooks, watched)
    count = len(run_together([target_of(site, place) for site, place, _ in fresh]))
    what, in_full = in_words(
        f"{count} of {len(run_together(resolved.targets))} products of {model_names}",
        resolved,
        simple=plan.is_simple,
    )
    handle.follow(sink.steering, watched, [place.module for _, place, _ in fresh], what)
    _report_missing_tensors([(site, wanted) for site, _, wanted in fresh])
    graphed_callables.say_replayed(models)
    _notices.info("watching %s", in_full)
    without = rank_left_out(resolved, sink.context.rank)
    if without:
        _notices.info("%s", without)
    _report_left_out([name for model in models for name in left_out(model, products)])


def _report_problems(
    sink: Sink,
    model_names: str,
    plan: WatchPlan,
    resolved: Resolved,
    watched: int,
    *,
    asked: bool,
) -> bool:
    """Report the rules that cannot work as written.

    Args:
        sink: The session.
        model_names: The names of the models.
        plan: The rules.
        resolved: The products that the rules chose.
        watched: The number of chosen modules that another watch has.
        asked: Whether the job called `watch`.

    Returns:
        Whether the model is known to be whole, not one stage of a pipeline.
    """
    info = sink.context.rank_info
    whole = not may_be_a_stage([target.layer for target in resolved.targets], info.world_size)
    problems = rank_problems(plan.rules, info.world_size)
    if resolved.targets:
        problems += [
            f"{model_names}: {text}"
            for text in _rule_problems(sink, model_names, plan, resolved, whole=whole)
        ]
        if asked and whole and plan.shared and not any(resolved.chosen):
            problems.append(f"{model_names}: no rule matches any of its {len(resolved.targets)} products")
    else:
        problems.append(
            f"{model_names or 'nothing'} has no product that capd knows; use capd_client.capture() for its tensors"
        )
    if watched:
        problems.append(
            f"{watched} modules are watched or planned already; remove() that handle or plan to change it"
        )
    for problem in problems:
        plan.report(problem, problem)
    return whole


def _rule_problems(
    sink: Sink, model_names: str, plan: WatchPlan, resolved: Resolved, *, whole: bool
) -> list[str]:
    """Return the problems of the rules on this model that are reported now.

    Other models may share the rules. A rule part that this model does not meet is reported later, if none meets it.
    """
    found = problems_of(resolved, whole=whole)
    if plan.shared:
        shared = shared_rules_of(sink.context)
        found = shared.unmet(found, met_by(resolved, found))
        if not plan.strict:
            shared.hold(model_names, found)
            found = [problem for problem in found if problem.part is None]
    return [problem.text for problem in found]


def _report_missing_tensors(products: list[tuple[Site, Mapping[str, Wanted]]]) -> None:
    asked = Counter(lack for site, wanted in products for lack in site.lacks if lack[0] in wanted)
    for (tensor, reason), count in asked.items():
        _notices.warn(f"lacks {tensor}", "%s of %d products is not captured: %s", tensor, count, reason)


def _report_left_out(names: Sequence[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        shown = ", ".join(names[:_SHOWN])
        _notices.info("not captured, because they multiply in ways of their own: %s%s", shown, more)
