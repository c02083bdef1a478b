"""Text at the program's edges: bytes from stdin and files, arguments, and text that goes to a terminal."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ling_local.errors import UsageError

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_LONE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Input as the model gets it. crlf: its lines ended in CRLF; warnings: what was changed, for stderr."""

    text: str
    crlf: bool = False
    warnings: tuple[str, ...] = ()


def read_text(data: bytes, source: str = "stdin") -> Cleaned:
    """UTF-8 bytes as text: a BOM is dropped, CRLF becomes LF, invalid bytes become U+FFFD with a warning.

    `crlf` is set where CRLF ends more lines than a bare LF does. A CR alone stays, it may be meant.
    A NUL byte is a UsageError with its offset: text has none, and a binary or UTF-16 file makes no prompt.
    Offsets count from the first byte of `data`.
    """
    nul = data.find(b"\0")
    if nul >= 0:
        convert = "convert it first: iconv -f UTF-16 -t UTF-8" if data.startswith(_UTF16) else "give UTF-8 text"
        raise UsageError(f"{source} is not text: NUL byte at offset {nul}", convert)
    skipped = len(_BOM) if data.startswith(_BOM) else 0
    body = data[skipped:]
    warnings: tuple[str, ...] = ()
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        text = body.decode("utf-8", "replace")
        # A U+FFFD that the input itself spells is whole and valid, so it survives decoding one to one.
        count = text.count(_REPLACEMENT) - body.count(_REPLACEMENT.encode())
        places = "place" if count == 1 else "places"
        warnings = (
            f"{source} is not valid UTF-8 in {count} {places}, the first at byte offset "
            f"{skipped + error.start}; replaced by U+FFFD",
        )
    pairs = text.count("\r\n")
    if not pairs:
        return Cleaned(text, False, warnings)
    crlf = pairs > text.count("\n") - pairs
    return Cleaned(text.replace("\r\n", "\n"), crlf, warnings)


def read_argument(text: str, source: str = "the prompt") -> Cleaned:
    """The same for an argument, into which Python smuggles bytes that are not UTF-8."""
    return read_text(text.encode("utf-8", "surrogateescape"), source)


class Newlines:
    """Gives streamed text back in the input's line ends. With crlf, each LF that lacks its CR gets one."""

    def __init__(self, crlf: bool) -> None:
        self._crlf = crlf
        self._after_cr = False

    def push(self, text: str) -> str:
        """The same text with the wanted line ends; nothing is held back."""
        if not self._crlf or not text:
            return text
        lead = "\n" if self._after_cr and text[0] == "\n" else ""
        self._after_cr = text[-1] == "\r"
        return lead + re.sub("(?<!\r)\n", "\r\n", text[len(lead) :])


def check_text(text: str) -> str:
    """The text without lone surrogates: bytes that Python smuggled into arguments are decoded or U+FFFD."""
    if not _LONE.search(text):
        return text
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # half of a UTF-16 pair, which was never a byte
        return _LONE.sub(_REPLACEMENT, text)


def _visible_table() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)}
    table[0x7F] = "\u2421"
    # C1, marks and overrides of direction, line and paragraph separators, interlinear annotation
    hidden = [*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]
    hidden += [*range(0xFFF9, 0xFFFC)]
    table.update({code: f"<U+{code:04X}>" for code in hidden})
    table.update(dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT))
    return table


_VISIBLE = _visible_table()


def visible(text: str) -> str:
    """Text that a terminal shows literally: controls as pictures (ESC is ␛), direction overrides as <U+202E>.

    Tab, newline and the joiners of emoji stay. Works character by character, so any split gives the same.
    """
    return text.translate(_VISIBLE)
