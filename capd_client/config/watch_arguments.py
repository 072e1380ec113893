"""The checked arguments of one `watch`, completed from the settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Optional, Union

from capd_client.config.settings import ClientConfig
from capd_client.config.values import rules as rules_from
from capd_client.errors import ConfigError
from capd_client.process.log import RateLimitedLog
from capd_client.protocol.selection import TENSORS, Ranges
from capd_client.rules.resolve import Rule, When, restricting
from capd_client.rules.schema import RuleSettings
from capd_client.rules.slices import Slice, parse_slices

__all__ = ["Select", "WatchPlan"]

Select = Union[str, "os.PathLike[str]", Mapping[str, Any], Sequence[str], Sequence[Mapping[str, Any]]]

_notices = RateLimitedLog()


class WatchPlan:
    """The rules of one `watch`, with its defaults filled in. `default` is the rule of a `watch` without rules."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        steps: Optional[str] = None,
        tensors: Optional[Iterable[str]] = None,
        select: Optional[Select] = None,
        slices: Union[str, Mapping[str, str], None] = None,
    ) -> None:
        self.strict = config.strict
        settings = self._selected(select, config.rules) if select else config.rules
        # Whether the other models of the job have the same rules.
        self.shared = bool(settings) and settings is config.rules
        only_names = all(RuleSettings(name=one.name, include=one.include) == one for one in settings)
        # Whether one line describes the plan.
        self.is_simple = len(settings) < 2 and only_names
        when = When(
            Ranges(config.steps) if steps is None else self._ranges(str(steps), config.steps),
            restricting(config.micro_batches),
            restricting(config.ranks),
        )
        rule = partial(
            Rule,
            when=when,
            tensors=None if tensors is None else self._chosen_tensors(tensors),
            slices=self._parsed_slices(slices, config.slice or {}),
            store=config.store,
        )
        self.default = rule(RuleSettings())
        self.rules = [rule(one) for one in settings] or [self.default]

    def _selected(self, select: Select, default: tuple[RuleSettings, ...]) -> tuple[RuleSettings, ...]:
        try:
            return rules_from(select)
        except ConfigError as error:
            self.report("select", f"watch(select=...): {error}; capturing as without it")
            return default

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
        # A TypeError means that a slice is no text.
        except (ConfigError, TypeError) as error:
            self.report(
                "slices", f"watch(slices=...): {error}; using the default, {default or 'whole tensors'}"
            )
            found = parse_slices(default)
        known = self._known_tensors("slices", found)
        return {name: take for name, take in found.items() if name in known}

    def _chosen_tensors(self, names: Iterable[str]) -> Optional[frozenset[str]]:
        """Return the known names; None, for the default, if all the given names are unknown."""
        wanted = frozenset([names] if isinstance(names, str) else names)
        known = self._known_tensors("tensors", wanted)
        return None if wanted and not known else known

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

    def report(self, reason: str, message: str) -> None:
        """Warn once, or raise ConfigError under CAPD_STRICT=1."""
        if self.strict:
            raise ConfigError(message)
        _notices.warn(reason, "%s", message)
