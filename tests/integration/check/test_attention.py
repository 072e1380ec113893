"""`capd check` of attention: sound calls of every kind hold, bugs are named, the rest is left out with its reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from capd.check.document import check_document
from capd.check.judging import ProductLimits
from tests.integration.check.attention_job import BUGS, LEFT_OUT, SOUND
from tests.kit.jobs.captured import run_captured
from tests.kit.jobs.products import checked_run

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_captured(tmp_path_factory.mktemp("attention"), "job", "tests.integration.check.attention_job")


def test_bugs_are_named_and_nothing_else(run: Path) -> None:
    checked = checked_run(run)
    document = check_document(str(run), checked, ProductLimits(), (), is_whole=False)
    first = {one["module"].removeprefix("kinds."): one for one in document["first"]}

    assert set(first) == set(BUGS)
    assert first["times105"]["factor"]["alpha"] == pytest.approx(1.05, abs=2e-3)
    assert first["stale_row"]["rows"]["beyond"] == 1
    judged = Counter(str(one.call.place["module"]).removeprefix("kinds.") for one in checked.findings)
    assert {name: judged[name] for name in (*SOUND, *BUGS)} == dict.fromkeys((*SOUND, *BUGS), 1)
    # The call without padding, of two layers. Of torch's own module, with weights and without.
    models: Counter[str] = Counter()
    for name, number in judged.items():
        if name.startswith("models."):
            models[name.split(".")[1]] += number
    assert models == {"llama": 2, "llama_eager": 2, "granite": 2, "mistral_wide": 2}
    assert judged["multihead"] == 2


def test_what_a_record_does_not_tell_is_left_out_by_reason(run: Path) -> None:
    reasons = {reason: n for reason, n in checked_run(run).left_out.items() if reason.startswith("O: ")}

    # gpt2 and llama with dropout: two layers, two calls each.
    assert reasons["O: dropout takes weights away at random"] == 8 + 1
    assert reasons["O: it has a sliding window"] == 4
    assert sum(n for reason, n in reasons.items() if "a soft cap" in reason) == 4
    # The mask of the padded calls, and that of one attention, were given as tensors.
    unknown = "O: its mask, scale or dropout is not recorded, and neither no mask nor the causal one fits"
    assert reasons[unknown] == 2 * 4 + 1
    assert len(LEFT_OUT) == 2
