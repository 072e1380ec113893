"""The request that all modes of `capd compare` share: the records, their grouping, and the printing."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capd.cli.completion import field_lists, store_paths
from capd.cli.options import Json, Wide, flag, option
from capd.cli.output import human_count, note, print_json, print_lines
from capd.cli.scheduling import ClusterOptions
from capd.cli.sources import SourceOptions, Sources, found_in
from capd.cli.stores import Given, StoreArgument, default_store
from capd.errors import ConfigError
from capd.store.objects.address import RunPlace
from capd.store.objects.address import place_of as run_place_of
from capd.strict_json import json_number, strict_json
from capd_client.process.text import human_value

if TYPE_CHECKING:
    from capd.report.gather import GatheredRecords

__all__ = ["CompareRequest", "fields_of", "name_some", "place_of", "shown_metric"]

# The number of left-out records that a line on stderr names.
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class CompareRequest:
    """The options that every mode of `capd compare` takes."""

    store: StoreArgument = None
    other: Annotated[
        Given | None,
        typer.Argument(
            metavar="OTHER",
            help="A second run to compare with, record by record.",
            show_default=False,
            parser=run_place_of,
            autocompletion=store_paths,
        ),
    ] = None
    by: Annotated[
        str | None,
        option(
            "--by",
            "FIELDS",
            "Group by these, as layer,phase,tensor_name.",
            autocompletion=field_lists,
        ),
    ] = None
    source: SourceOptions
    cluster: ClusterOptions
    as_csv: Annotated[bool, flag("--csv", "Print comma-separated values.")] = False
    wide: Wide = False
    as_json: Json = False

    @property
    def place(self) -> RunPlace:
        """STORE, or the default store."""
        return default_store() if self.store is None else self.store

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields to group by, empty for "none". Raises ConfigError for an unknown field."""
        text = "tensor_name" if self.by is None else self.by
        return () if text == "none" else fields_of("--by", text)

    def refuse(self, what: str, options: Mapping[str, Any]) -> None:
        """Raise ConfigError for the first option that was given but means nothing in this mode."""
        if self.as_csv and self.as_json:
            raise ConfigError("--csv and --json are two formats of one output; give one of them")
        for name, value in options.items():
            if value:
                raise ConfigError(
                    f"{name} means nothing for a comparison of {what}; see `capd compare --help`"
                )

    def gather(
        self, fields: tuple[str, ...], *, products: bool = False, **asked: Any
    ) -> tuple[Sources, GatheredRecords]:
        """Read STORE and group its records by `fields`.

        Args:
            fields: The fields, empty for all records together.
            products: Whether to measure the products of linear layers, too. Calls of several runs cannot be told apart,
                so this takes one run.
            asked: Further arguments of `capd.report.gather.gather`.

        Raises:
            CapdError: As `found_in` and `Sources.gather` do.
        """
        from capd.analyze.groups import Groups
        from capd.report.gather import GatheredRecords
        from capd.report.products.linear_calls import LinearCalls

        found = replace(found_in(self.place, self.source), cluster=self.cluster)
        gathered = GatheredRecords(groups=Groups({(): True, fields: True}))
        if products and len(found.names) == 1:
            gathered.calls = LinearCalls()
        found.gather(gathered, **asked)
        return found, gathered

    def print(self, document: dict[str, Any], header: Sequence[str], rows: Sequence[Sequence[Any]]) -> bool:
        """Print JSON or CSV if the options request it. Return False if a table is wanted."""
        if self.as_json:
            print_json(strict_json(document))
        elif self.as_csv:
            text = io.StringIO()
            writer = csv.writer(text, lineterminator="\n")
            writer.writerows([header, *([_cell(value) for value in row] for row in rows)])
            print_lines(text.getvalue().splitlines())
        return self.as_json or self.as_csv


def fields_of(option: str, text: str) -> tuple[str, ...]:
    """Return the fields that an option names, each once. Raises ConfigError for an unknown field."""
    from capd.analyze.groups import checked_fields

    return checked_fields(option, (word.strip() for word in text.split(",")))


def name_some(noun: str, what: str, names: Sequence[str], total: int | None = None) -> None:
    """Print on stderr the number of left-out items, the reason, and the first names.

    Args:
        noun: The name of one item, such as "record".
        what: The reason.
        names: The names of the items, or of some.
        total: The number of items, None if `names` has all of them.
    """
    count, shown = len(names) if total is None else total, names[:_NAMED]
    rest = ", …" if count > len(shown) else ""
    note(f"{human_count(count, noun)} {what}: {'; '.join(shown)}{rest}")


def place_of(fields: Sequence[str], group: Mapping[str, Any]) -> list[str]:
    """Return a group's values of the fields by which it is grouped, as tables show them."""
    return [human_value(group[field]) for field in fields]


def shown_metric(errors: Mapping[str, Any], name: str) -> float | None:
    """Return a metric as tables have it. Three digits of a cosine would be 1.00 wherever it matters."""
    value: float | None = errors[name]
    return value if value is None or name != "cosine" else 1 - value


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return json_number(value) if isinstance(value, float) else "" if value is None else value
