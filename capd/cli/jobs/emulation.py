"""The emulation that `capd run --quant-type` requests of a job, and the notes of the job's processes about it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from capd.errors import ConfigError

__all__ = ["Choice", "EmulationNotes", "choose", "read_notes", "with_recipe_file"]

NONE = "none"


class Choice(NamedTuple):
    """The CAPD_EMULATE of a job ("none": nothing is emulated), and the reason if the quant type is only a label."""

    recipe: str
    why_label: str = ""

    @property
    def text(self) -> str:
        """The choice in words."""
        return f"a label: {self.why_label}" if self.why_label else f"emulation: {self.recipe}"


def with_recipe_file(quant_type: str | None) -> tuple[str | None, str | None]:
    """Return the label of a quant type, and the recipe as text if the quant type is a recipe's file.

    Raises:
        ConfigError: If the file cannot be used.
    """
    from capd_client.recipes.find import is_recipe_file, recipe_of_file

    if quant_type is None or "," in quant_type or not is_recipe_file(quant_type):
        return quant_type, None
    recipe = recipe_of_file(quant_type)
    return recipe.name, json.dumps({"linear": recipe.as_mapping()})


def choose(quant_type: str, environ: Mapping[str, str], *, label_only: bool) -> Choice:
    """Choose the emulation of a job whose captures are labelled `quant_type`.

    Args:
        quant_type: The label, or a recipe as JSON. It is also what to emulate, unless `environ` has a CAPD_EMULATE.
        environ: The environment that the user gives the job.
        label_only: Whether to emulate nothing.

    Raises:
        ConfigError: If CAPD_EMULATE cannot be used.
    """
    from capd_client.config.settings import check_setting
    from capd_client.config.values import emulation, flag

    if label_only:
        return Choice(NONE, "--label-only")
    own = environ.get("CAPD_EMULATE", "").strip()
    if own:
        try:
            check_setting("emulate", own)
        except ConfigError as error:
            raise ConfigError(f"CAPD_EMULATE: {error}") from None
        return Choice(NONE, f"CAPD_EMULATE={own}") if emulation(own) is None else Choice(own)
    replaced = environ.get("CAPD_REPLACE_TENSOR_SAVER", "").strip()
    if replaced and flag(replaced):
        return Choice(NONE, "with CAPD_REPLACE_TENSOR_SAVER the job names its quant types itself")
    try:
        if emulation(quant_type) is None:
            return Choice(NONE, f"{quant_type} needs no emulation")
    except ConfigError:
        return Choice(NONE, f"{quant_type} is no number format that capd emulates")
    return Choice(quant_type)


@dataclass(frozen=True)
class EmulationNotes:
    """The notes of one job's processes about its emulation.

    Attributes:
        recipes: The recipes that were put on the job's models.
        ended: The reason why the recipes were removed during the job, "" if they were not.
        why_none: The reason why there are no recipes.
    """

    recipes: tuple[str, ...] = ()
    ended: str = ""
    why_none: str = ""

    @property
    def text(self) -> str:
        """The recipe with which the job computed until its end, or "none"."""
        return NONE if self.ended or not self.recipes else "; ".join(self.recipes)

    def lines(self) -> Iterator[str]:
        """The lines of the summary."""
        if self.ended:
            yield (
                f"the job {self.ended}: the emulation was removed during the job, and each record says which was "
                "active; run the job again with --label-only"
            )
        elif self.recipes:
            yield from (f"emulated: {recipe}" for recipe in self.recipes)
        elif self.why_none:
            yield f"nothing was emulated, quant_type is a label: {self.why_none}"


def read_notes(notes: Iterable[str], why_no_model: str) -> EmulationNotes:
    """Parse the lines that the processes noted. `why_no_model` is the reason if no line is about an emulation."""
    found: dict[str, dict[str, None]] = {}
    for line in notes:
        word, _, rest = line.partition(" ")
        found.setdefault(word, {})[rest] = None
    recipes, ended = tuple(found.get("emulated", ())), next(iter(found.get("removed", ())), "")
    own = next(iter(found.get("label-only", ())), "")
    failed = next(iter(found.get("unemulated", ())), "")
    return EmulationNotes(recipes, ended, f"the job {own}" if own else failed or why_no_model)
