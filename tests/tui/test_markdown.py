"""Markdown as lines: literal text, copyable code, every width; blocks add up to one full render."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ling_local.text.clean import visible
from ling_local.tui.blocks import Block
from ling_local.tui.code import highlight
from ling_local.tui.markdown import Rendered, open_lines
from markdown_texts import SOURCES, one_by_one, rendered, texts

WIDTHS = (1, 7, 20, 40, 80, 200)
DOCUMENT = """\
# Why `copy` is slow
The loop **copies the list** each time. Use `deque`, *really*.
A second line.

1. First
2. Then code:
   ```python
   def f(x: int) -> str:
       \"\"\"Doc.\"\"\"

       return str(x)
   ```
3. nested
   - a
   - 中文列表项，很长很长，长到必须换行的列表项，因为屏幕很窄

> quoted
> - list in it

```python
class Ring:
\tlimit = 3

    def push(self, value): self.items.append(value) if len(self.items) < self.limit else self.overflow(value)
```

| Name | Meaning | Value |
|:-----|:-------:|------:|
| TPOT | time per output token, over all of them | 2.1 ms |
| 中文 | 每个输出标记的时间 | 476 |

***
Python 是一种广泛使用的解释型、高级和通用的编程语言。👨‍👩‍👧‍👦 é
"""


def printed(blocks: list[Block], width: int, colour: bool = True) -> str:
    """What a terminal of that width gets."""
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=width, color_system="standard" if colour else None)
    for block in blocks:
        console.print(Rendered(block), crop=False)
    return file.getvalue()


def plain(source: str, width: int = 80) -> str:
    """The finished text without styles."""
    return "\n".join(rendered(source, width))


def whole(source: str, width: int, colour: bool = True) -> str:
    return printed([Block(source)] if source.strip() else [], width, colour)


def cells(output: str) -> list[tuple[str, str]]:
    """Each character with its colour."""
    console, result = Console(), []
    for line in output.split("\n"):
        text = Text.from_ansi(line)
        result += [(char, str(text.get_style_at_offset(console, at))) for at, char in enumerate(text.plain)]
    return result


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("source", [DOCUMENT, *SOURCES])
def test_blocks_one_after_the_other_are_the_full_render(source: str, width: int) -> None:
    assert printed(one_by_one(source), width) == whole(source, width)


@settings(max_examples=400, deadline=None)
@given(texts, st.sampled_from((10, 40)))
def test_blocks_of_any_text_are_its_full_render(source: str, width: int) -> None:
    assert printed(one_by_one(source), width) == whole(source, width)


def python_functions(number: int) -> list[str]:
    lines = []
    for index in range(number):
        lines += [f"def f{index}(x):", '    """Say', "", "    if", "", "    not", '    more."""']
        lines += [f"    return {index}", ""]
    return lines


def test_parts_of_a_long_fence_are_coloured_as_the_whole() -> None:
    """Context that is cut short begins at the margin, where nothing is open."""
    source = "```python\n" + "\n".join(python_functions(150)) + "\n```\n\ntext\n"
    blocks = one_by_one(source)
    assert len(blocks) > 25
    assert printed(blocks, 80) == whole(source, 80)


def test_a_part_that_begins_inside_a_string_is_coloured_as_one() -> None:
    docstring = ['"""Module.', "", *["A docstring that goes on and on.", "for, while, if", ""] * 30, '"""', ""]
    source = "```python\n" + "\n".join([*docstring, *python_functions(20)]) + "\n```\n"
    blocks = one_by_one(source)
    assert "for, while, if" in blocks[1].text
    assert cells(printed(blocks, 80)) == cells(whole(source, 80))


@pytest.mark.parametrize(
    "text",
    [
        "if 0<foo or foo>10: Vec<int>",
        "<b>x</b> <!-- c --> <kbd>K</kbd>",
        "[/INST] [/] [bold list[int] :smile: [red]x[/red]",
        "&lt; &copy; &#27;[31m &nbsp;",
        "<https://example.org> https://example.org",
        "snake_case_name __init__.py __name__ 2*3*4 f(*args, **kw)",
        "C:\\dir\\file $HOME `",
    ],
)
@pytest.mark.parametrize("wrapped", ["{}", "- {}", "> {}", "| a |\n|---|\n| {} |", "```\n{}\n```", "    {}"])
def test_text_is_literal(text: str, wrapped: str) -> None:
    assert text in plain(wrapped.format(text), 200)


def test_a_link_shows_where_it_leads() -> None:
    assert plain("see [docs](https://a.org/x?a=1&b=%20 'title') and [https://b.org](https://b.org)") == (
        "see docs (https://a.org/x?a=1&b=%20) and https://b.org"
    )
    assert plain("![alt](pic.png)") == "alt (pic.png)"
    assert plain("[x](javascript:alert)") == "[x](javascript:alert)"
    assert plain("[a]: https://a.org") == "[a]: https://a.org"


@pytest.mark.parametrize(
    "source", ["[a](&#27;]0;title&#7;)", "[a](<\x1b[2J>)", "```\x1b[2J\nx\x1b[31m\n```", "\x1b]8;;u\x07"]
)
def test_no_escape_code_comes_from_the_text(source: str) -> None:
    assert "\x1b" not in printed(one_by_one(visible(source)), 80, colour=False)
    assert "\x07" not in printed(one_by_one(visible(source)), 80)
    assert "\x1b]" not in printed(one_by_one(visible(source)), 80)


def test_without_colours_no_escape_code_is_written() -> None:
    assert "\x1b" not in printed(one_by_one(DOCUMENT), 80, colour=False)


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_only_code_and_what_cannot_be_cut_is_wider_than_the_screen(width: int) -> None:
    source = DOCUMENT.replace("```python\nclass", "```\nclass")
    too_wide = [line for line in rendered(source, width) if cell_len(line) > width]
    assert all(
        "self." in line or "def f" in line or "return" in line or '"""' in line or width < 12 for line in too_wide
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_ends_in_blanks(width: int) -> None:
    assert all(line == line.rstrip() for line in rendered(DOCUMENT, width))


def test_code_is_copied_as_it_was_written() -> None:
    code = "def f():\n\tlong = '" + "x" * 300 + "'\n\n    return  long\n\n\nlast"
    assert plain(f"text\n\n```python\n{code}\n```\n\nend") == f"text\n\n{code}\n\nend"
    assert plain(f"```\n{code}\n```") == code
    assert plain(f"```no-such-language\n{code}") == code


@pytest.mark.parametrize(
    "language", ["python", "c", "javascript", "bash", "json", "yaml", "html", "diff", "make", "text"]
)
def test_highlighting_never_changes_the_code(language: str) -> None:
    code = "\ufeffa = 'b\n\n\t#include <x>\n/* open\n<div>{{ x }}</div>\n$(echo 'hi')\n- [ ] 中文 \u3000\n"
    assert [line.plain for line in highlight(code, language)] == code.removesuffix("\n").split("\n")


def test_code_has_colours() -> None:
    assert any(span.style for span in highlight("def f(): pass", "python")[0].spans)


def test_cjk_lines_fill_to_the_edge() -> None:
    text = "中文" * 100
    lines = plain(text, 40).split("\n")
    assert [cell_len(line) for line in lines] == [40] * 10
    mixed = "Python 是一种广泛使用的解释型、高级和通用的编程语言。它由 Guido 创造，支持多种编程范型。" * 5
    lines = plain(mixed, 40).split("\n")
    assert all(cell_len(line) >= 36 for line in lines[:-1])
    assert "".join(lines).replace(" ", "") == mixed.replace(" ", "")


def test_closing_punctuation_does_not_begin_a_line() -> None:
    for width in range(8, 30):
        assert not any(
            line[:1] in "，。、）" for line in plain("中文，标点。不应、在（行首）。" * 4, width).split("\n")
        )


def test_a_glyph_is_never_torn() -> None:
    family = "👨‍👩‍👧‍👦"
    assert all(set(line.split(family)) == {""} for line in plain(family * 30, 7).split("\n"))


def test_a_narrow_table_stands_row_below_row() -> None:
    source = "| Name | Meaning | Value | Unit |\n|---|---|---|---|\n| TPOT | time per token | 2.1 | ms |\n"
    assert plain(source, 80).split("\n")[0] == "Name  Meaning         Value  Unit"
    assert plain(source, 20).split("\n") == ["Name: TPOT", "Meaning: time per", "token", "Value: 2.1", "Unit: ms"]


def test_lists_keep_blank_lines_where_the_source_has_them() -> None:
    assert plain("- a\n- b\n\n- c\n  - d\n\n    e") == " • a\n • b\n\n • c\n    • d\n\n      e"
    assert plain("8. a\n9. b\n10. c") == " 8. a\n 9. b\n 10. c"


def test_nesting_beyond_all_reason_is_shown_as_written() -> None:
    source = ">" * 40 + " deep"
    assert plain(source) == source
    assert plain("- " * 40 + "deep", 200).count("deep") == 1


def test_a_half_fence_or_table_is_plain_and_prose_is_not() -> None:
    assert [line.plain for line in open_lines(Block("| a | b |\n|---|---|\n| 1"), 40)] == [
        "| a | b |",
        "|---|---|",
        "| 1",
    ]
    lines = open_lines(Block("- item:\n  ```python\n  def f():"), 40)
    assert [line.plain for line in lines] == ["- item:", "  ```python", "  def f():"]
    assert not any(line.spans for line in lines)
    assert [line.plain for line in open_lines(Block("a **bold** move"), 40)] == ["a bold move"]
    assert [line.plain for line in open_lines(Block("a **bol"), 40)] == ["a **bol"]
