"""From files to documents, conversations and tokens."""

from __future__ import annotations

import ast
import random
import re
from pathlib import Path

import jinja2
import numpy as np
import pytest

from ling_local.errors import ModelError
from ling_local.train import corpus, persona
from ling_local.train.chats import SYSTEM_TEXTS, Turn, extract_functions, make_chats, render
from ling_local.train.documents import Document, make_document, split, strip_licence
from ling_local.train.reference import describe, first_sentences, parse_page
from ling_local.train.snippets import make_files, make_snippets
from ling_local.train.sources import SOURCES, UNSEEN, find_file
from ling_local.train.vocab import CONTROL_TOKENS, EOS, train_tokenizer

DEMO = Path(__file__).parents[2] / "ling_local" / "data" / "demo"
PAGE = """:mod:`itertools` --- Functions
================================

.. module:: itertools

.. function:: chain(*iterables)

   Make an iterator that returns elements from the first iterable until it is
   exhausted, then proceeds to the next one.  See :func:`map`.  Roughly equivalent to::

      def chain(*iterables): ...

.. class:: Box(size=0)

   A box of ``size`` things.

   .. method:: open(*, wide=False)

      Return *wide* or :class:`~box.Lid`, e.g. an open one. Raise :exc:`ValueError`
      if it is locked.

      >>> Box().open()
      Lid()

   .. attribute:: lid

      .. versionadded:: 3.1
"""


def test_reference_entries_become_plain_sentences() -> None:
    chain, box, opened = parse_page(PAGE)
    assert chain.name == "itertools.chain"
    assert chain.text.startswith("Make an iterator that returns elements")
    assert "::" not in chain.text
    assert "`map`" in chain.text
    assert (box.name, box.text) == ("itertools.Box", "A box of `size` things.")
    assert opened.name == "itertools.Box.open"
    assert opened.text == "Return `wide` or `box.Lid`, e.g. an open one. Raise `ValueError` if it is locked."
    assert opened.example == ">>> Box().open()\nLid()"


@pytest.mark.parametrize(
    ("text", "noun", "expected"),
    [
        ("Return a list.", False, "`f` returns a list."),
        ("Creates a file.", False, "`f` creates a file."),
        ("A point.", True, "`f` is a point."),
        ("A point.", False, ""),
        ("Raised when it fails.", True, "`f` is raised when it fails."),
        ("See there.", False, ""),
    ],
)
def test_describe_makes_a_sentence_about_the_name(text: str, noun: bool, expected: str) -> None:
    assert describe("f", text, noun) == expected


def test_first_sentences_refuses_what_is_no_prose() -> None:
    assert first_sentences([".. note::", "   x"]) == ""
    assert first_sentences(["no full stop here and it goes on"]) == ""
    assert first_sentences(["Do this now, please.", "", "More."]) == "Do this now, please."


def test_conversations_are_what_the_chat_template_writes() -> None:
    template = jinja2.Environment().from_string((DEMO / "chat_template.jinja").read_text(encoding="utf-8"))
    turns = [Turn("What is len?", "`len` counts.", "Easy."), Turn("And\nabs?", "It is\n\n```python\nx\n```", "Hm.")]
    for thinking in (True, False):
        for system in ("", *SYSTEM_TEXTS):
            messages = [{"role": "system", "content": system}] if system else []
            for turn in turns:
                reasoning = {"reasoning_content": turn.thought} if thinking else {}
                messages.append({"role": "user", "content": turn.question})
                messages.append({"role": "assistant", "content": turn.answer, **reasoning})
            written = template.render(messages=messages, enable_thinking=thinking, add_generation_prompt=False)
            assert render(turns, thinking, system) == written


def test_every_conversation_is_well_formed() -> None:
    snippets = make_snippets(seed=1, rounds=2)
    chats = list(make_chats(parse_page(PAGE), snippets, [], seed=1, rounds=1))
    assert len(chats) > 1000
    for chat in chats:
        assert chat.startswith("<role>SYSTEM</role>")
        assert chat.endswith(EOS)
        assert chat.count("<think>") == chat.count("</think>") == chat.count("<role>ASSISTANT</role>") >= 1
        assert not re.search(r"\{(task|kind|code)?\}", chat.split("```")[0])  # no phrase was left unfilled


def test_snippets_are_valid_and_varied_python() -> None:
    snippets = make_snippets(seed=3, rounds=3)
    assert len({snippet.code for snippet in snippets}) == len(snippets) > 200
    for snippet in snippets:
        names = [node.name for node in ast.parse(snippet.code).body]
        assert names == [snippet.name]
        assert "$" not in snippet.code
        assert "@" not in snippet.code
    for text in make_files(snippets, seed=3, count=200):
        ast.parse(text)
    assert make_snippets(seed=3, rounds=3) == snippets


def test_a_snippet_computes_what_it_says() -> None:
    for snippet in make_snippets(seed=5, rounds=4):
        if snippet.task == "Return the greatest common divisor of two numbers.":
            scope: dict = {}
            exec(snippet.code, scope)
            assert scope[snippet.name](12, 18) == 6


def test_talk_has_no_empty_part() -> None:
    for question, answer, thought in persona.conversations(random.Random(1), 500):
        assert question
        assert answer
        assert thought
        assert "\\n" not in answer


def _file(number: int, package: str = "p", extra: str = "") -> Document:
    lines = [f"value_number_{number}_{i} = compute_something({i})" for i in range(20)]
    return Document(package, f"{number}.py", "code", "\n".join(lines) + extra + "\n")


def test_copies_are_dropped_and_unseen_packages_leave_no_trace() -> None:
    shared = _file(1, "flask")
    vendored = Document("other", "vendor_flask.py", "code", shared.text + "x = 1\n")
    parts = split([vendored, shared, *(_file(i) for i in range(2, 40))], UNSEEN)
    assert parts.unseen == [shared]
    assert vendored not in parts.train + parts.heldout
    assert parts.dropped_copies == 1


def test_the_split_depends_on_the_files_alone() -> None:
    files = [_file(i) for i in range(400)]
    first, second = split(files, UNSEEN), split(list(reversed(files)), UNSEEN)
    assert first == second
    assert not set(first.train) & set(first.heldout)


def test_unwanted_files_are_no_documents() -> None:
    code = b"def f(x):\n    return x + 1\n\n\n" * 10
    assert make_document("p", "a.py", code) is not None
    assert make_document("p", "pip/_vendor/a.py", code) is None
    assert make_document("p", "x_pb2.py", code) is None
    assert make_document("p", "a.txt", code) is None
    assert make_document("p", "a.py", b"# GNU General Public License\n" + code) is None
    assert make_document("p", "a.py", b"\xff\xfe" + code) is None
    assert make_document("p", "a.py", b"TABLE = [" + b"123456, " * 400 + b"]\n") is None


def test_licence_headers_are_stripped_and_other_comments_kept() -> None:
    assert (
        strip_licence("#!/bin/env python\n# Copyright X\n# Licence Y\n\nimport a\n") == "#!/bin/env python\nimport a\n"
    )
    assert strip_licence("# a helpful remark\nimport a\n") == "# a helpful remark\nimport a\n"


def test_short_documented_functions_are_extracted() -> None:
    text = """import os


def size(path):
    '''Return the size of a file in bytes.'''
    status = os.stat(path)
    return status.st_size
"""
    (snippet,) = extract_functions([Document("p", "a.py", "code", text)], limit=10)
    assert (snippet.name, snippet.task) == ("size", "Return the size of a file in bytes.")
    assert snippet.code.startswith("def size(path):")


def test_a_trained_tokenizer_keeps_newlines_and_indentation_apart() -> None:
    texts = [snippet.code for snippet in make_snippets(seed=1, rounds=3)]
    tokenizer = train_tokenizer(texts, vocab_size=600)
    assert [tokenizer.token_to_id(token) for token in CONTROL_TOKENS] == list(range(len(CONTROL_TOKENS)))
    pieces = tokenizer.encode("def f(x):\n    return x\n\n        y\n", add_special_tokens=False).tokens
    assert all(piece == "Ċ" or "Ċ" not in piece for piece in pieces)
    assert "Ġ" * 4 in pieces
    assert "Ġ" * 8 in pieces
    text = "né\t\x00 \r\n \u4e2d\U0001f600 <think>x"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_token_files_give_back_the_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 4096, 10_000).astype(np.uint16)
    made = corpus.TokenSet(tokens, np.array([0, 17, 5000], dtype=np.int64), 30_000)
    corpus.save_tokens(made, tmp_path, "x")
    again = corpus.load_tokens(tmp_path, "x")
    assert np.array_equal(again.tokens, tokens)
    assert again.starts.tolist() == [0, 17, 5000]
    assert again.text_bytes == 30_000
    with pytest.raises(ModelError, match=r"y\.json: not there"):
        corpus.load_tokens(tmp_path, "y")


def test_sources_are_pinned_and_found_by_exact_version(tmp_path: Path) -> None:
    assert all(source.version and source.licence for source in SOURCES)
    assert {"flask", "marshmallow"} <= {source.name.lower() for source in SOURCES}
    (tmp_path / "wheels").mkdir()
    source = next(source for source in SOURCES if source.name == "python-dateutil")
    (tmp_path / "wheels" / f"python_dateutil-{source.version}-py3-none-any.whl").touch()
    (tmp_path / "wheels" / "other-1.0-py3-none-any.whl").touch()
    found = find_file(source, tmp_path)
    assert found is not None
    assert found.name.startswith("python_dateutil")
    (tmp_path / "wheels" / f"python_dateutil-{source.version}-py3-none-any.whl").unlink()
    assert find_file(source, tmp_path) is None
