"""Bytes of tokens in, text out: runes that span tokens, without waiting for what can never come."""

from __future__ import annotations

import codecs


class StreamText:
    """Incremental UTF-8. The joined results equal `bytes.decode("utf-8", "replace")` of all bytes at once.

    An incomplete rune waits for its next byte; a byte that cannot belong to a rune is U+FFFD at once.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """Text that is certain after these bytes."""
        text = self._decoder.decode(data)
        waiting = self._decoder.getstate()[0]
        # The decoder gives the first two bytes of an encoded surrogate a third one before it refuses them.
        if waiting[:1] == b"\xed" and waiting[1:2] >= b"\xa0":
            text += self.close()
        return text

    def close(self) -> str:
        """What still waited: U+FFFD for a rune that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
