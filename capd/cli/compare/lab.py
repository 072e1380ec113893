"""`capd compare STORE --lab`: the errors of formats that the daemon measured while it captured."""

from __future__ import annotations

from typing import Any

from capd.cli.compare.formats import print_errors, say_unmeasured
from capd.cli.compare.request import CompareRequest
from capd.cli.output import human_count, note
from capd.errors import NothingMatched

__all__ = ["compare_lab"]


def compare_lab(request: CompareRequest, formats: str | None) -> int:
    """Print the stored errors of all formats, or of some, and return the exit code."""
    from capd.analyze.format_choice import choices
    from capd.report.format_errors import error_document, lab_numbers
    from capd.report.measured import OUTSIDE_SAMPLE
    from capd.report.verdict_document import verdict_document

    labels = None if formats is None else [one.label for one in choices(formats)]
    is_verdict = request.by is None
    fields = () if is_verdict and not request.as_json else request.fields
    found, gathered = request.gather(fields, stored=True, labels=labels)
    measured = gathered.groups.whole().errors
    if not measured:
        reasons = dict.fromkeys(reason for _, reason in gathered.unmeasured if reason != OUTSIDE_SAMPLE)
        raise NothingMatched(
            f"no errors measured while capturing in {', '.join(found.names)}: "
            f"{'; '.join(reasons) or OUTSIDE_SAMPLE}; set [lab] formats in capd.toml, or compare without --lab"
        )
    chosen = choices(",".join(measured))
    numbers = lab_numbers(gathered)
    document = {
        **error_document(found.names, gathered, chosen, fields),
        "verdict": verdict_document(gathered, chosen),
        "lab": numbers,
    }
    print_errors(request, document, verdict=is_verdict)
    note(_text(numbers))
    say_unmeasured({at: count for at, count in gathered.unmeasured.items() if at[1] != OUTSIDE_SAMPLE})
    return found.exit_code(gathered)


def _text(numbers: dict[str, Any]) -> str:
    samples, outside = numbers["samples"], numbers["outside"]
    named = f"sample {' and '.join(samples)}" if samples else "of an unknown sample"
    rest = f"; {human_count(outside, 'record')} outside of it" if outside else ""
    return f"measured while capturing, {named}: {numbers['measured']:,} of {numbers['in_sample']:,} records{rest}"
