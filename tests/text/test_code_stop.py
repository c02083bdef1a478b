"""The default end of a raw code completion: where the block that the prompt left open is finished."""

from __future__ import annotations

from time import perf_counter

import pytest

from ling_local.text.code_stop import CodeStop

CASES = {
    "body of an open def": ("def add(a, b):\n    return", " a + b\n", "\n\ndef sub(a, b):\n    return a - b\n"),
    "after the header's newline": ("def f():\n", "    return 1\n", "print(f())\n"),
    "after the header's colon": ("def f():", "\n    return 1\n", "print(f())\n"),
    "inside the header": ("def f(a", ", b):\n    return [\n1,\n]\n", "print(f(1, 2))\n"),
    "open for body at top level": ("for x in y:\n", "    print(x)\n", "print('done')\n"),
    "nested body, next line of the function": ("def f():\n    for x in y:\n", "        g(x)\n", "    return 1\n"),
    "method, next method": ("class A:\n    def f(self):\n", "        return 1\n", "\n    def g(self):\n"),
    "cursor at class level": (
        "class A:\n    x = 1\n\n    ",
        "def f(self):\n        pass\n\n    def g(self):\n        pass\n",
        "\nclass B:\n",
    ),
    "else continues an if": ("if a:\n    b = 1", "\nelif c:\n    b = 2\nelse:\n    b = 3\n", "elsewhere = 4\n"),
    "except and finally continue a try": (
        "try:\n    f()",
        "\nexcept OSError:\n    pass\nfinally:\n    g()\n",
        "h()\n",
    ),
    "a name that begins like else": ("if a:\n    b = 1", "\n", "else2 = 4\nc\n"),
    "finally may not follow if": ("if a:\n    b = 1", "\n", "finally:\n    x\n"),
    "else does not continue a def": ("def f():\n    b = 1", "\n", "else:\n    x\n"),
    "brackets are no dedent": ("def f():\n    x = [", "\n1,\n2,\n]\n    return x\n", "y = 1\n"),
    "triple quotes are no dedent": ("def f():\n    '''Doc", "\nmore\n\n\n\nlast.\n    '''\n    pass\n", "y = 1\n"),
    "a docstring that the model opens": ("def f():\n", '    """Doc\nflush left\n"""\n    return 1\n', "y\n"),
    "backslash is no dedent": ("def f():\n    x = 1 + \\", "\n2\n    return x\n", "y = 1\n"),
    "quotes and brackets in strings": ("def f():\n", "    a = '([{'\n    b = \"it's\"\n    c = ''\n", "d = 1\n"),
    "comments decide nothing": ("def f():\n    x = 1", "\n# flush left\n\n    return x\n", "\n# next\ny = 1\n"),
    "blank lines inside a block stay": ("def f():\n    x = 1", "\n\n\n\n    return x\n", "\n\n\ny = 1\n"),
    "tabs": ("def f():\n\tx = 1", "\n\treturn x\n", "y = 1\n"),
    "a decorator below the block ends it": ("def f():\n    return", " 1\n", "\n\n@cache\ndef g():\n    pass\n"),
    "a decorator and its def are one statement": ("import os\n@cache\n", "def g():\n    return 1\n", "x = g()\n"),
    "decorated def generated": ("import os\n\n", "@a\n@b(\n1)\ndef g():\n    return 1\n", "\n@c\ndef h():\n"),
    "a second statement after a def": ("import os\n", "\n\ndef f():\n    return 1\n", "\nx = f()\n"),
    "two blank lines at top level": ("x = 1", " + 2\ny = 3\n", "\n\nz = 4\n"),
    "one blank line at top level goes on": ("import os\n", "x = 1\n\ny = 2\n\nz = 3\n", ""),
    "blank lines before the first text": ("import os", "\n\n\n\nx = 1\n", "\n\ny = 2\n"),
    "open bracket at top level": ("x = [\n    1,", "\n\n\n\n    2,\n]\ny = 1\n", "\n\nz = 2\n"),
    "a header that became a one-liner": ("if a:", " b = 1\nc = 2\n", "\n\nd = 3\n"),
    "a header with a comment": ("def f():  # why:", "\n    return 1\n", "x = 1\n"),
    "a slice is no header": ("def f():\n    x = y[1:", "2]\n    return x\n", "z = 1\n"),
    "carriage returns": ("def f():\r\n    return", " 1\r\n", "\r\n\r\nx = 1\r\n"),
    "a dict entry is no header": ("x = {\n  'if a':", "\n 1}\ny = 2\n", "\n\nz = 1\n"),
}

PROSE = {
    "a story": (
        "Once upon a time",
        " there was a fox.\n\n\n\nIt ran (far away\n\n\nand came back: home.\n\n\nThe end.\n",
    ),
    "an apostrophe": ("It doesn't", ' matter, "he said\n\n\n\nand left.\n'),
    "Chinese paragraphs": ("　　从前有座山", "，山里有座庙。\n　　庙里有个和尚。\n\n第二章\n\n　　下雨了。\n"),
    "headings": ("# Title\n\nSome text:\n", "\nMore text.\n\n\n## Next\n\n\nText.\n"),
    "nothing": ("", "Hello there.\n\n\nHow are you?\n"),
}


def _run(prompt: str, text: str, size: int) -> tuple[str, str | None]:
    stop = CodeStop(prompt)
    shown = "".join(stop.push(text[i : i + size]) for i in range(0, len(text), size))
    shown += stop.close()
    return shown, stop.hit


@pytest.mark.parametrize("name", CASES)
def test_code_ends_where_its_block_ends(name: str) -> None:
    prompt, kept, dropped = CASES[name]
    for size in (1, 2, 3, 7, 1000):
        shown, hit = _run(prompt, kept + dropped, size)
        assert shown == kept
        assert (hit is not None) == bool(dropped)


@pytest.mark.parametrize("name", PROSE)
def test_prose_is_never_cut(name: str) -> None:
    prompt, text = PROSE[name]
    for size in (1, 5, 1000):
        assert _run(prompt, text, size) == (text, None)


def test_the_reason_is_told() -> None:
    assert _run("def f():\n", "    x\ny\n", 1)[1] == "dedent"
    assert _run("import os\n", "def f():\n    x\ny\n", 1)[1] == "statement"
    assert _run("x = 1\n", "y = 2\n\n\n", 1)[1] == "blank lines"


def test_nothing_comes_after_the_end() -> None:
    stop = CodeStop("def f():\n")
    assert stop.push("    x\ny = 1\n") == "    x\n"
    assert stop.push("    z\n") == ""
    assert stop.close() == ""


def test_a_line_is_released_as_it_grows() -> None:
    stop = CodeStop("def f():\n    ")
    assert stop.push("ret") == "ret"
    assert stop.push("urn 1") == "urn 1"
    assert stop.push("\n") == "\n"
    assert stop.push("\n    ") == ""
    assert stop.push("y") == "\n    y"


def test_held_blank_lines_come_out_at_the_end_of_the_stream() -> None:
    assert _run("def f():\n", "    return 1\n\n   ", 1) == ("    return 1\n\n   ", None)
    assert _run("def f():\n", "    return 1\n# note", 1) == ("    return 1\n# note", None)


def test_a_cut_off_word_after_a_dedent_is_not_shown() -> None:
    assert _run("if a:\n    b", "\nels", 1) == ("\n", "dedent")
    assert _run("if a:\n    b", "\nelse", 1) == ("\nelse", None)


def test_the_first_generated_line_is_never_swallowed() -> None:
    for prompt in ("def f():\n", "def f():\n    x = 1\n\n", "class A:\n    def f(self):\n"):
        assert _run(prompt, "print(1)\n", 1) == ("print(1)\n", None)


def test_time_is_linear_in_prompt_and_text() -> None:
    def seconds(lines: int) -> float:
        began = perf_counter()
        stop = CodeStop("def f():\n" + "    x = [1, 'a', (2)]  # note\n" * lines)
        for _ in range(lines):
            stop.push("\n")
            stop.push("    y")
        for _ in range(lines):
            stop.push("\n")
        stop.close()
        return perf_counter() - began

    short = min(seconds(300) for _ in range(3))
    assert min(seconds(2400) for _ in range(3)) < 8 * 4 * short + 0.05
