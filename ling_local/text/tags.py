"""Tags in a stream of text: how they are spelt, where the next one is, and what may still become one."""

from __future__ import annotations

import re
from functools import lru_cache

CALL, CALL_END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
THINK, THINK_END = "<think>", "</think>"
TURN_END = "<|role_end|>"


@lru_cache(maxsize=16)
def pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Finds any of the tags."""
    return re.compile("|".join(map(re.escape, tags)) or r"(?!)")


def held_length(data: str, start: int, tags: tuple[str, ...]) -> int:
    """How much of the end of data[start:] is the beginning of a tag, or all of one."""
    for length in range(min(len(data) - start, max(map(len, tags))), 0, -1):
        suffix = data[-length:]
        if any(tag.startswith(suffix) for tag in tags):
            return length
    return 0
