"""The schema of `[[rule]]`: which tensors of which modules are captured, when, and how much is kept. No torch.

capd.toml, the file that CAPD_SELECT names, and `watch(select=...)` share it. The types check the shape of a rule, and
`check` knows the allowed values.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Optional, Union

import msgspec
from msgspec import Meta

from capd_client.errors import ConfigError
from capd_client.protocol.selection import TENSORS, check_globs, check_range
from capd_client.rules.patterns import compile_pattern
from capd_client.rules.slices import parse_slices

__all__ = [
    "MAX_RULES", "OPERATIONS", "STORES", "RangeText", "RuleSettings", "WholeNumber", "check_fields",
    "check_rule_fields", "check_rules", "operation_of", "parse_rules", "rule_label", "rule_of_globs", "texts",
    "unknown_setting",
]  # fmt: skip

MAX_RULES = 32
MAX_NAME_CHARS = 64
MAX_LISTED = 64
OPERATIONS = ("forward", "backward")
STORES = ("full", "stats", "both")

# The bounds are TOML's. Python refuses to print much larger numbers.
WholeNumber = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
RangeText = Union[str, WholeNumber]
_Texts = Union[str, list[str]]


class RuleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rule. A field that is None excludes nothing, or takes the value that applies without rules.

    Attributes:
        name: The name in messages; by default the rule's number.
        include, exclude: Regular expressions, searched for in qualified module names without wrappers.
        layers: Layer indices, as Ranges.
        components: "linear", "FA", …
        tensors: Names from TENSORS.
        operations: Names from OPERATIONS.
        slices: Rows to keep, as in `watch`.
        store: One of STORES.
        steps, micro_batches, ranks: Ranges that replace those of [when].
    """

    name: Optional[str] = None
    include: Optional[_Texts] = None
    exclude: Optional[_Texts] = None
    layers: Optional[RangeText] = None
    components: Optional[_Texts] = None
    tensors: Optional[_Texts] = None
    operations: Optional[_Texts] = None
    slices: Union[str, dict[str, str], None] = None
    store: Optional[str] = None
    steps: Optional[RangeText] = None
    micro_batches: Optional[RangeText] = None
    ranks: Optional[RangeText] = None

    def check(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A field cannot be read or selects nothing. The message names it and the accepted values.
        """
        if self.name is not None and not (0 < len(self.name) <= MAX_NAME_CHARS and self.name.isprintable()):
            raise ConfigError(f"name: 1 to {MAX_NAME_CHARS} printable characters, not {self.name[:80]!r}")
        for field in ("include", "exclude"):
            for text in _listed(field, getattr(self, field)):
                compile_pattern(text)
        for field in ("layers", "steps", "micro_batches", "ranks"):
            if getattr(self, field) is not None:
                check_range(field, str(getattr(self, field)))
        _check_names("components", _listed("components", self.components))
        _check_known("operations", _listed("operations", self.operations), OPERATIONS)
        _check_known("tensors", _listed("tensors", self.tensors), TENSORS)
        _check_known("store", texts(self.store), STORES)
        self._check_operations()
        self._check_slices()

    def _check_operations(self) -> None:
        operations = texts(self.operations)
        for tensor in texts(self.tensors):
            if operations and operation_of(tensor) not in operations:
                raise ConfigError(
                    f"tensors: {tensor} belongs to {operation_of(tensor)}, which operations excludes"
                )

    def _check_slices(self) -> None:
        if self.slices is None:
            return
        if isinstance(self.slices, dict):
            _check_known("slices", _listed("slices", list(self.slices)), TENSORS)
        try:
            parse_slices(self.slices)
        except ConfigError as error:
            raise ConfigError(f"slices: {error}") from None


def texts(value: Optional[_Texts]) -> tuple[str, ...]:
    """Return one text or several as a tuple; None as an empty one."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def operation_of(tensor: str) -> str:
    """Return the operation that a tensor belongs to, by its name."""
    return "backward" if tensor.startswith("grad_") else "forward"


def rule_of_globs(globs: Iterable[str]) -> RuleSettings:
    """Return the rule for names that match one of the globs. Raises ConfigError for an invalid glob."""
    wanted = tuple(globs)
    check_globs(wanted)
    return RuleSettings(
        name=", ".join(wanted)[:MAX_NAME_CHARS], include=[rf"\A{fnmatch.translate(glob)}" for glob in wanted]
    )


def parse_rules(documents: Iterable[Mapping[str, Any]]) -> tuple[RuleSettings, ...]:
    """Parse, check and name the rules in `documents`. Raises ConfigError that names the rule and its field."""
    tables = list(documents)
    check_rule_fields(tables)
    try:
        return check_rules(msgspec.convert(tables, list[RuleSettings]))
    except msgspec.ValidationError as error:
        raise ConfigError(f"a rule cannot be read: {error}") from None


def check_rule_fields(documents: Iterable[object]) -> None:
    """Raise ConfigError for the first unknown field. Documents that are not mappings are skipped, not refused."""
    for number, document in enumerate(documents, 1):
        if isinstance(document, Mapping):
            label = rule_label(document, number)
            check_fields(document, RuleSettings.__struct_fields__, f" in {label}")


def check_rules(rules: Collection[RuleSettings]) -> tuple[RuleSettings, ...]:
    """Check the rules and give each a unique name. Raises ConfigError that names the rule and its field."""
    if len(rules) > MAX_RULES:
        raise ConfigError(f"{len(rules)} rules; at most {MAX_RULES} are allowed")
    found: dict[str, RuleSettings] = {}
    for number, rule in enumerate(rules, 1):
        try:
            rule.check()
        except ConfigError as error:
            raise ConfigError(f"{rule_label({'name': rule.name}, number)}: {error}") from None
        name = str(number) if rule.name is None else rule.name
        if name in found:
            raise ConfigError(f"two rules are called {name!r}; the number of a rule is its name by default")
        found[name] = msgspec.structs.replace(rule, name=name)
    return tuple(found.values())


def check_fields(table: Mapping[str, Any], known: Collection[str], where: str = "", prefix: str = "") -> None:
    """Raise ConfigError for the first key that is not `known`."""
    for name in table:
        if name not in known:
            raise ConfigError(unknown_setting(str(name), known, where, prefix))


def unknown_setting(name: str, known: Collection[str], where: str = "", prefix: str = "") -> str:
    """Return the message about an unknown key, with the nearest known one."""
    return f"unknown setting {prefix}{name[:80]}{where}; {_nearest(name, known, prefix)}"


def _nearest(name: str, known: Collection[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name[:80], known, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"


def rule_label(document: object, number: int) -> str:
    """Return the name of a rule for messages. The document may be anything."""
    name = document.get("name") if isinstance(document, Mapping) else None
    return f"rule {name[:MAX_NAME_CHARS] if isinstance(name, str) else str(number)!r}"


def _listed(field: str, value: Optional[_Texts]) -> tuple[str, ...]:
    found = texts(value)
    if value is not None and not 0 < len(found) <= MAX_LISTED:
        raise ConfigError(f"{field}: 1 to {MAX_LISTED} entries, not {len(found)}; leave it out to have all")
    return found


def _check_names(field: str, names: Iterable[str]) -> None:
    for name in names:
        if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable()):
            raise ConfigError(f"{field}: 1 to {MAX_NAME_CHARS} printable characters, not {name[:80]!r}")


def _check_known(field: str, names: Iterable[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{field}: {name[:80]!r} is unknown; {_nearest(name, known)}")
