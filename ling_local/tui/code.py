"""Code in the terminal's own sixteen colours, as lines that hold exactly what was written."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from pygments.lexer import Lexer
    from rich.syntax import SyntaxTheme

_THEME = "ansi_dark"  # no background; names colours that a person's own palette defines
MAX_CHARS = 200_000  # in one go; more is shown without colours


def highlight(code: str, language: str, before: str = "") -> list[Text]:
    """The code's lines. language is a name that Pygments knows, or anything; before is code that came earlier."""
    lexer = _lexer(language.lower())
    source = before + code
    pieces = [] if lexer is None or len(source) > MAX_CHARS else list(lexer.get_tokens(source))
    if "".join(value for _, value in pieces) != source:  # a lexer that changes its input: better plain than wrong
        return [Text(line) for line in _lines(code)]
    lines = [Text()]
    for kind, value in pieces:
        style = _theme().get_style_for_token(kind)
        first, *others = value.split("\n")
        lines[-1].append(first, style)
        lines += [Text.assemble((other, style)) for other in others]
    skipped = before.count("\n")
    return lines[skipped : skipped + len(_lines(code))]


def _lines(code: str) -> list[str]:
    return code.removesuffix("\n").split("\n") if code else []


@lru_cache(maxsize=32)
def _lexer(language: str) -> Lexer | None:
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    if not language:
        return None
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


@lru_cache(maxsize=1)
def _theme() -> SyntaxTheme:
    from rich.syntax import Syntax

    return Syntax.get_theme(_THEME)
