"""The stream of a dump.json: its entries one after the other, so that memory follows one entry and not the file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from capd.pt_files.pickle_scan import BadTensorFile

__all__ = ["entries_of", "header_of"]

MAX_ENTRY_CHARS = 16 << 20
MAX_HEADER_CHARS = 1 << 20
_READ_NBYTES = 1 << 18
_SPACE = " \t\r\n"


def entries_of(file: BinaryIO) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each member of "data", in the order of the file.

    NaN and Infinity are read as Python's writer spells them.

    Raises:
        BadTensorFile: The file is no JSON of a dump, or one of its values is too large or nested too deep.
    """
    reader = _Reader(file)
    for name in reader.members():
        if name == "data":
            for entry in reader.members():
                yield entry, reader.value(MAX_ENTRY_CHARS)
        else:
            reader.value(MAX_HEADER_CHARS)
    reader.must_end()


def header_of(file: BinaryIO) -> dict[str, Any] | None:
    """Return the members before "data", None if the file does not begin as a dump.json does."""
    reader = _Reader(file)
    found: dict[str, Any] = {}
    try:
        for name in reader.members():
            if name == "data":
                return found if "task" in found and reader.peek() == "{" else None
            found[name] = reader.value(MAX_HEADER_CHARS)
    except BadTensorFile:
        return None
    return None


class _Reader:
    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder = file, json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False

    def members(self) -> Iterator[str]:
        """Yield the names of an object's members. The caller reads each value before it asks for the next name."""
        self._expect("{")
        if self.peek() == "}":
            self._at += 1
            return
        while True:
            name = self.value(MAX_HEADER_CHARS)
            if not isinstance(name, str):
                raise BadTensorFile("its JSON has a member without a name")
            self._expect(":")
            yield name
            if self.peek() == "}":
                self._at += 1
                return
            self._expect(",")

    def value(self, most_chars: int) -> Any:
        """Read one value of at most this many characters."""
        self.peek()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise BadTensorFile(f"its JSON is cut off or damaged: {error.msg}") from None
            except RecursionError:
                raise BadTensorFile("its JSON is nested too deep") from None
            except ValueError:
                # Python reads no integer of more than 4300 digits.
                raise BadTensorFile("a number in its JSON has thousands of digits") from None
            else:
                # A number at the end of what was read may go on.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return found
            held = len(self._text) - self._at
            if held > most_chars:
                raise BadTensorFile(
                    f"a value in its JSON takes more than {most_chars} characters, or is damaged"
                )
            self._more(max(_READ_NBYTES, held))

    def peek(self) -> str:
        """Return the next character that is no space, "" at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _SPACE:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more(_READ_NBYTES)

    def must_end(self) -> None:
        """Raise BadTensorFile if something follows."""
        if self.peek():
            raise BadTensorFile("its JSON is followed by other text")

    def _expect(self, mark: str) -> None:
        if (found := self.peek()) != mark:
            raise BadTensorFile(f"its JSON has {found!r} in the place of {mark!r}")
        self._at += 1

    def _more(self, nbytes: int) -> None:
        data = self._file.read(nbytes)
        self._ended = not data
        try:
            text = self._utf8.decode(data, final=self._ended)
        except UnicodeDecodeError:
            raise BadTensorFile("its JSON is no UTF-8") from None
        self._text, self._at = self._text[self._at :] + text, 0
