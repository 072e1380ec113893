"""The job's part of capd.toml for the command line: pydantic checks every table and key, and finds all problems.

The training job reads the same file with msgspec (`capd_client.config.file`), which is light and stops at the first
problem. The job's own functions decide which values are accepted. The shapes are defined twice, and a property test
compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from capd_client.config.settings import check_file_value
from capd_client.errors import ConfigError
from capd_client.rules.schema import RuleSettings, check_rules, rule_label, unknown_setting

__all__ = ["JobSettings", "problems_of"]


def _setting(key: str) -> AfterValidator:
    """Return a validator that accepts what the training job accepts for this key of the file."""

    def check(value: Any) -> Any:
        try:
            check_file_value(key, value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(check)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


_WholeNumber = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
_RangeText = str | _WholeNumber
_Texts = str | list[str]


class WhenTable(_Table):
    """The table [when]: the moments for rules without their own."""

    steps: Annotated[_RangeText, _setting("when.steps")] | None = None
    micro_batches: Annotated[_RangeText, _setting("when.micro_batches")] | None = None
    ranks: Annotated[_RangeText, _setting("when.ranks")] | None = None


def _check_rule(rule: RuleSettings) -> None:
    try:
        rule.check()
    except ConfigError as error:
        raise ValueError(str(error)) from None


class RuleTable(_Table):
    """One table [[rule]], with the fields of `capd_client.rules.schema.RuleSettings`."""

    name: str | None = None
    include: _Texts | None = None
    exclude: _Texts | None = None
    layers: _RangeText | None = None
    components: _Texts | None = None
    tensors: _Texts | None = None
    operations: _Texts | None = None
    slices: str | dict[str, str] | None = None
    store: Literal["full", "stats", "both"] | None = None
    steps: _RangeText | None = None
    micro_batches: _RangeText | None = None
    ranks: _RangeText | None = None

    @field_validator("*")
    @classmethod
    def _check_field(cls, value: Any, info: ValidationInfo) -> Any:
        """Check each field alone, so that no problem hides another."""
        _check_rule(RuleSettings(**{str(info.field_name): value}))
        return value

    @model_validator(mode="after")
    def _check(self) -> RuleTable:
        _check_rule(self.settings())
        return self

    def settings(self) -> RuleSettings:
        """Return the rule as the training job knows it."""
        return RuleSettings(**self.model_dump())


class JobSettings(_Table):
    """The whole file except [daemon], which `capd.config.DaemonSettings` describes."""

    quant_type: Annotated[str, _setting("quant_type")] | None = None
    policy: Annotated[str, _setting("policy")] | None = None
    mode: Annotated[str, _setting("mode")] | None = None
    watch: Annotated[str, _setting("watch")] | None = None
    slice: Annotated[str, _setting("slice")] | None = None
    max_block_ms: Annotated[_WholeNumber | float, _setting("max_block_ms")] | None = None
    arena_bytes: Annotated[_WholeNumber | str, _setting("arena_bytes")] | None = None
    max_mb_per_step: Annotated[_WholeNumber | float | str, _setting("max_mb_per_step")] | None = None
    max_d2h_gbps: Annotated[_WholeNumber | float | str, _setting("max_d2h_gbps")] | None = None
    ring_bytes: Annotated[_WholeNumber | str, _setting("ring_bytes")] | None = None
    piece_bytes: Annotated[_WholeNumber | str, _setting("piece_bytes")] | None = None
    snapshot: Annotated[str, _setting("snapshot")] | None = None
    ring: Annotated[str, _setting("ring")] | None = None
    exit_timeout_s: Annotated[_WholeNumber | float, _setting("exit_timeout_s")] | None = None
    when: WhenTable = WhenTable()
    rule: list[RuleTable] = Field(default=[], description="Rules. Each capture must match one of them.")
    daemon: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> JobSettings:
        try:
            check_rules([rule.settings() for rule in self.rule])
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


def problems_of(table: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each problem that the training job has with the file, except for [daemon]."""
    try:
        JobSettings.model_validate(table)
    except ValidationError as error:
        found: dict[str, list[str]] = {}
        for entry in error.errors(include_url=False):
            place, message = _place_and_message(entry, table)
            found.setdefault(place, []).append(message)
        return [
            sentence
            for place, messages in found.items()
            for sentence in ([f"{place}: {_joined(messages)}"] if place else messages)
        ]
    return []


def _joined(messages: list[str]) -> str:
    """Return one sentence about a value that has none of the accepted types."""
    first, *others = dict.fromkeys(messages)
    return first + "".join(" or " + other.removeprefix("Input should be ") for other in others)


def _place_and_message(entry: ErrorDetails, table: Mapping[str, Any]) -> tuple[str, str]:
    """Return place and message of an error in the words of the job. The place is "" if the message names it."""
    unknown, message = entry["type"] == "extra_forbidden", entry["msg"].removeprefix("Value error, ")
    match entry["loc"]:
        case ["rule", int(index), *rest]:
            label = rule_label(table["rule"][index], index + 1)
            if unknown:
                return "", unknown_setting(str(rest[0]), RuleTable.model_fields, f" in {label}")
            # The message of a ValueError names the field.
            if entry["type"] == "value_error":
                return "", f"{label}: {message}"
            return ": ".join([label, *map(str, rest[:1])]), message
        case ["when", field, *_]:
            if unknown:
                return "", unknown_setting(str(field), WhenTable.model_fields, prefix="when.")
            return f"when.{field}", message
        case [field, *_]:
            if unknown:
                return "", unknown_setting(str(field), JobSettings.model_fields)
            return str(field), message
    return "", message
