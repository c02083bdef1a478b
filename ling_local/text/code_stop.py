"""Where a raw code completion ends when nobody says: at the end of the block that the prompt left open.

The rule, for Python and other text that is laid out like it:

- Only the beginning of a logical line can end the completion. Lines inside brackets or triple quotes and after
  a backslash belong to the line before; blank lines and comments decide nothing and wait for the next code.
- The cursor's block: if the line under the cursor is, or becomes, a header (`def f():`, `for x in y:`), the block
  is that header's body, as deep as its first line turns out. Else it is the block of the line under the
  cursor; on an empty line, of the first line that is generated.
- Inside an indented block the completion ends before the first line indented less than the block. A clause
  that continues the block's own statement (`else` after `if`, `except` after `try`, ...) does not end it.
- At top level it ends before a second statement that follows the body of a generated `def` or `class` (the
  decorators above a `def` are one statement with it), and, in text that has shown itself to be code, at
  the second blank line after something was generated. Prose is therefore never cut.

The cut lies after the line break of the last line that belongs; blank lines and comments in between are dropped.
"""

from __future__ import annotations

import re

_HEADERS = frozenset(
    ("def", "class", "if", "elif", "else", "for", "while", "try", "except", "finally", "with", "match", "case")
)
_FOLLOW = {
    "if": {"elif", "else"},
    "elif": {"elif", "else"},
    "for": {"else"},
    "while": {"else"},
    "try": {"except", "else", "finally"},
    "except": {"except", "else", "finally"},
    "else": {"finally"},
}
_SCOPES = ("def", "class")
_TAB = 8
_CODE_LINE = re.compile(
    r"import\s+\w|from\s+[\w.]+\s+import\b|@\w|(?:async\s+)?def\s+\w|class\s+\w+\s*[(:]|#!"
    r"|[A-Za-z_][\w.]*(?:\[[^\]]*\])?\s*[-+*/|&]?=(?!=)|[A-Za-z_][\w.]*\("
)
_KEPT_START = 80  # characters of a line that are enough to know it by


class _Lexer:
    """What a character is, over any text: in brackets, a string, a comment, or plain code."""

    def __init__(self) -> None:
        self.depth = 0
        self.comment = False
        self._quote = ""
        self._triple = False
        self._run = 0  # quotes in a row: opening ones while `_opening`, else closing ones of a triple
        self._opening = False
        self.escaped = False  # after a backslash

    @property
    def inside(self) -> bool:
        """In brackets or a string, or after a backslash: the next line continues this one."""
        return self.depth > 0 or bool(self._quote) or self.escaped

    def feed(self, char: str) -> bool:
        """Take in one character; True if it is code (no comment, no part of a string)."""
        if self._opening and self._open(char):
            return False
        if self._quote:
            self._in_string(char)
            return False
        if self.comment:
            self.comment = char != "\n"
            return False
        if self.escaped:
            self.escaped = char == "\r"  # a backslash before CRLF joins lines too
            return True
        if char in "\"'":
            self._quote, self._opening, self._run, self._triple = char, True, 1, False
            return False
        self.comment = char == "#"
        self.escaped = char == "\\"
        if char in "([{":
            self.depth += 1
        elif char in ")]}":
            self.depth = max(0, self.depth - 1)
        return not self.comment

    def _open(self, char: str) -> bool:
        """Count the quotes that open a string. True while they go on."""
        if char == self._quote and self._run < 3:
            self._run += 1
            if self._run == 3:
                self._triple, self._opening, self._run = True, False, 0
            return True
        self._opening = False
        if self._run == 2:  # an empty string, over already
            self._quote = ""
        self._run = 0
        return False

    def _in_string(self, char: str) -> None:
        if self.escaped:
            self.escaped = char == "\r"
        elif char == "\\":
            self.escaped, self._run = True, 0
        elif char == "\n" and not self._triple:  # never closed: an apostrophe in prose, or a broken line
            self._quote = ""
        elif char != self._quote:
            self._run = 0
        else:
            self._run += 1
            if not self._triple or self._run == 3:
                self._quote, self._run = "", 0


class _Line:
    """The logical line that is being read."""

    __slots__ = ("colon", "indent", "start", "text")

    def __init__(self) -> None:
        self.indent = 0
        self.text = ""  # its first characters, enough to know it by
        self.colon = False  # the last code character is a colon outside brackets
        self.start = True  # nothing but blanks so far

    @property
    def word(self) -> str:
        words = re.match(r"(?:async\s+)?(\w*)", self.text)
        return words[1] if words else ""

    @property
    def header(self) -> bool:
        return self.colon and self.word in _HEADERS

    @property
    def code(self) -> bool:
        return bool(_CODE_LINE.match(self.text)) or self.header

    def add(self, char: str) -> None:
        if len(self.text) < _KEPT_START:
            self.text += char


class CodeStop:
    """Ends a raw code completion by the rule above. The same text and cut for any split; linear time.

    Text that is pushed continues `prompt`. What might come after the end is held back until that is known.

    hit  "dedent", "statement" or "blank lines"; None while the completion goes on
    """

    def __init__(self, prompt: str) -> None:
        self.hit: str | None = None
        self._lexer = _Lexer()
        self._line = _Line()
        self._column = 0
        self._stack: list[_Line] = []  # the lines that enclose the current one, by indentation
        self._floor: int | None = None  # indentation of the cursor's block; None: the next line decides
        self._owner: _Line | None = None  # the header of that block
        self._judging = True  # decisions are made; off while the prompt is read
        self._on_cursor_line = False
        self._clause = False  # a dedented line whose first word is not complete yet
        self._kept_comment = False
        self._scope = False  # the last line at top level opened a def or class
        self._scope_body = False  # and lines of its body followed
        self._code = False
        self._content = False
        self._blank_lines = 0
        self._held: list[str] = []
        self._read_prompt(prompt)

    def _read_prompt(self, prompt: str) -> None:
        self._judging = False
        for char in prompt:
            self._take(char)
        self._judging = True
        self._on_cursor_line = not self._line.start
        self._floor, self._owner = None, None
        self._scope = self._scope_body = False
        self._blank_lines = 0

    def push(self, text: str) -> str:
        """Text that is certain to belong. Nothing more once there was a hit."""
        if self.hit is not None:
            return ""
        certain = 0
        for index, char in enumerate(text):
            ends_line = self._take(char)
            if self.hit is not None:
                break
            if ends_line or not self._waiting():
                certain = index + 1
        out = "".join([*self._held, text[:certain]]) if certain else ""
        if certain or self.hit is not None:
            self._held.clear()
        if self.hit is None:
            self._held.append(text[certain:])
        return out

    def close(self) -> str:
        """At the end of the stream: what was held back, unless it had begun a line after the end."""
        if self.hit is not None:
            return ""
        out = "".join(self._held)
        self._held.clear()
        if self._clause and not self._is_clause():
            self.hit = "dedent"
            return ""
        return out

    def _waiting(self) -> bool:
        """Whether what was read since the last line may still turn out to lie after the end."""
        if self._clause:
            return True
        return self._line.start and self._floor is not None and not self._kept_comment

    def _take(self, char: str) -> bool:
        """Take in one character. True if it ends a line that belongs."""
        self._content = self._content or (self._judging and not char.isspace())
        if self._clause and not (char.isalnum() or char == "_"):
            self._end_clause()
        if char == "\n":
            return self._newline()
        if self._line.start and not self._lexer.comment:
            if char in " \t\r\f":  # what indents code; the wide blanks before a Chinese paragraph are its text
                self._column += _TAB - self._column % _TAB if char == "\t" else char == " "
                return False
            if char == "#":
                self._begin_comment()
            else:
                self._begin_line()
        code = self._lexer.feed(char)
        if not self._line.start:
            self._line.add(char)
            if not self._lexer.comment and not char.isspace():
                self._line.colon = code and char == ":" and self._lexer.depth == 0
        return False

    def _newline(self) -> bool:
        joined = self._lexer.escaped
        self._lexer.feed("\n")
        joined = joined or self._lexer.inside
        if self._line.start:
            return self._end_empty_line()
        if joined:
            self._line.add(" ")
            return True
        self._end_line()
        self._line, self._column = _Line(), 0
        return True

    def _end_empty_line(self) -> bool:
        """After a line without code: blank, or a comment."""
        kept, self._kept_comment, self._column = self._kept_comment, False, 0
        if kept:
            return True
        self._blank_lines += 1
        if self._floor == 0 and self._judging and self._blank_lines >= 2 and self._content and self._code:
            self.hit = "blank lines"
        return False

    def _begin_comment(self) -> None:
        floor = self._floor or 0
        self._kept_comment = self._column >= floor and not (self._column == 0 and self._scope_body)
        if self._kept_comment:
            self._blank_lines = 0

    def _begin_line(self) -> None:
        """The first character of a logical line: does it still belong?"""
        line, self._line.start, self._line.indent = self._line, False, self._column
        self._blank_lines = 0
        if self._judging:
            self._judge(line)
        while self._stack and self._stack[-1].indent >= line.indent:
            self._stack.pop()
        self._stack.append(line)

    def _judge(self, line: _Line) -> None:
        if self._floor is None:
            self._set_floor(line.indent)
        elif line.indent < self._floor:
            owner = self._owner
            self._clause = owner is not None and owner.indent == line.indent and owner.word in _FOLLOW
            if not self._clause:
                self.hit = "dedent"
        elif self._floor == 0 and line.indent == 0 and self._scope_body:
            self.hit = "statement"
        self._scope_body = self._scope and line.indent > 0

    def _set_floor(self, indent: int) -> None:
        self._floor = indent
        self._owner = next((line for line in reversed(self._stack) if line.indent < indent), None)

    def _is_clause(self) -> bool:
        return self._owner is not None and self._line.word in _FOLLOW.get(self._owner.word, ())

    def _end_clause(self) -> None:
        """The first word of a dedented line is complete."""
        self._clause = False
        if self._is_clause():
            self._floor, self._owner = self._line.indent + 1, self._line
        else:
            self.hit = "dedent"

    def _end_line(self) -> None:
        line = self._line
        self._code = self._code or line.code
        if line.indent == 0:
            self._scope = line.header and line.word in _SCOPES
        if self._judging and self._on_cursor_line:
            self._on_cursor_line = False
            if line.header:
                self._floor = None
            else:
                self._set_floor(line.indent)
