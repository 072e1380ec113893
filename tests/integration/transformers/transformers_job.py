"""A training job for each scenario of transformers, captured and not, in processes that share one import.

    python transformers_job.py ENDPOINT DIRECTORY [SCENARIO ...]

Every scenario (transformers_scenarios.py) is a process of its own, forked before anything of capd or of autograd has
begun: a rank with its own run (the name of the scenario), trained once without capd and once with it. What it found
goes to DIRECTORY/<name>.json.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.integration.transformers.transformers_scenarios import SCENARIOS, Losses, Training, Watch

TENSORS = (
    "input", "weight", "output", "grad_output", "grad_input", "grad_weight", "offsets",
    "query", "key", "value", "grad_query", "grad_key", "grad_value",
)  # fmt: skip

CLASSES = (
    "LlamaForCausalLM", "MixtralForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "WhisperForConditionalGeneration",
    "T5ForConditionalGeneration", "CLIPModel", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM", "Seq2SeqTrainer",
    "AttentionInterface",
)  # fmt: skip
"""What is used of transformers; older ones lack the last."""


def unwatched(model: nn.Module) -> None:
    """The job as it is without capd."""


def watched(model: nn.Module) -> None:
    import capd_client

    _handles.append(capd_client.watch(model, steps="all", tensors=TENSORS))


_handles: list[Any] = []


def _seeded(run: Training, watch: Watch) -> Losses:
    torch.manual_seed(3)
    torch.compiler.reset()
    return run(watch)


def _scenario(name: str, endpoint: str) -> dict[str, Any]:
    plain = _seeded(SCENARIOS[name], unwatched)
    os.environ.update(
        CAPD_ENDPOINT=endpoint,
        CAPD_RUN_ID=name,
        CAPD_POLICY="block",
        CAPD_ARENA_BYTES=str(8 << 20),
        CAPD_EXIT_TIMEOUT_S="300",  # on a busy machine the daemon is behind: it seals the runs of twenty ranks
    )
    before = _functions()
    captured = _seeded(SCENARIOS[name], watched)
    import capd_client

    for handle in _handles:
        handle.remove()
    capd_client.close()
    left = sorted(
        f"{file}.{name}"
        for (file, name), found in _functions().items()
        if before.get((file, name), found) is not found
    )
    return {"plain": plain, "captured": captured, "counters": capd_client.counters(), "left": left}


def _functions() -> dict[tuple[str, str], Any]:
    """Whatever a tap might have patched: members of transformers' files and of their classes, and torch's functions."""
    found = {}
    for file, module in list(sys.modules.items()):
        if module is None or not file.startswith(("transformers.", "torch.nn.functional")):
            continue
        for name, value in list(vars(module).items()):
            found[file, name] = value
            if isinstance(value, type) and value.__module__ == file:
                found.update({(file, f"{name}.{member}"): own for member, own in vars(value).items()})
    return found


def _fork(name: str, endpoint: str, directory: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(directory / f"{name}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        result = _scenario(name, endpoint)
        (directory / f"{name}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _import_all(names: list[str]) -> None:
    """Everything that takes a scenario time to import; only imported, nothing of it begins."""
    if "lora" in names:
        import peft  # noqa: F401
    import torch._dynamo.backends.debugging  # noqa: F401

    import capd_client.watching.watch  # noqa: F401

    for name in CLASSES:
        getattr(transformers, name, None)


def main(endpoint: str, directory: Path, names: list[str]) -> int:
    """Two at a time; returns how many failed."""
    torch.set_num_threads(1)
    _import_all(names)
    waiting, running, failed = list(names), set(), 0
    while waiting or running:
        while waiting and len(running) < 2:
            running.add(_fork(waiting.pop(0), endpoint, directory))
        done, status = os.wait()
        running.remove(done)
        failed += status != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or list(SCENARIOS)))
