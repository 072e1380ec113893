"""Ranges and selections: what they mean, and what is refused before anything acts on it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capd_client.errors import ConfigError
from capd_client.protocol.control import Control, Steer, Steered
from capd_client.protocol.messages import decode_client, decode_daemon, encode
from capd_client.protocol.selection import MAX_GLOBS, MAX_RANGE_CHARS, TENSORS, Ranges, Selection

numbers = st.integers(0, 30)


@st.composite
def parts(draw: st.DrawFn) -> str:
    first, more, stride = draw(numbers), draw(numbers), draw(st.integers(1, 7))
    return draw(
        st.sampled_from(
            ["all", f"{first}", f"{first}-", f"{first}-{first + more}", f"{first}-{first + more}:{stride}"]
        )
    )


@given(st.lists(parts(), min_size=1, max_size=4), numbers)
def test_reaches_tells_whether_a_member_comes_at_or_behind_a_number(texts: list[str], number: int) -> None:
    ranges = Ranges(",".join(texts))

    assert ranges.reaches(number) == any(n in ranges for n in range(number, 200))
    assert ranges.first_from(number) == next((n for n in range(number, 200) if n in ranges), None)


@pytest.mark.parametrize(
    ("selection", "problem"),
    [
        ({"steps": "soon"}, "as a range"),
        ({"steps": ""}, "selects nothing"),
        ({"micro_batches": "5-1"}, "is empty"),
        ({"ranks": "0," * MAX_RANGE_CHARS}, "characters"),
        ({"steps": "__import__('os').system('x')"}, "as a range"),
        ({"modules": ()}, "globs"),
        ({"modules": ("*",) * (MAX_GLOBS + 1)}, "globs"),
        ({"modules": ("",)}, "printable"),
        ({"modules": ("a\n",)}, "printable"),
        ({"modules": ("x" * 257,)}, "printable"),
        ({"tensors": ()}, "known: input"),
        ({"tensors": ("input", "x")}, "'x' given; known: input, weight"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(selection: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", r"\(")):
        Selection(**selection).check()  # type: ignore[arg-type]


def test_what_can_be_passes_and_goes_over_the_wire_unchanged() -> None:
    selection = Selection(
        steps="0-:100", micro_batches="all", ranks="3", modules=("*.mlp.*",), tensors=TENSORS
    )
    selection.check()
    steer = Steer(id=3, from_iteration=7, capturing=False, selection=selection)
    control = Control("select", "run", selection, 7, 2.5)
    steered = Steered(id=4, in_force=steer, since=8, pending=steer, modules=2, problem="no")

    assert decode_daemon(encode(steer)) == steer
    assert decode_client(encode(control)) == control
    assert decode_client(encode(steered)) == steered


@pytest.mark.parametrize(
    "selection",
    [
        {"steps": "1" * (MAX_RANGE_CHARS + 1)},
        {"steps": 1},
        {"modules": ["*"] * (MAX_GLOBS + 1)},
        {"modules": "*"},
        {"tensors": ["x"] * (len(TENSORS) + 1)},
        {"expression": "1"},
    ],
)
def test_the_wire_has_the_same_limits(selection: dict[str, object]) -> None:
    frame = msgspec.msgpack.encode({"type": "control", "verb": "select", "selection": selection})

    with pytest.raises(msgspec.DecodeError):
        decode_client(frame)
