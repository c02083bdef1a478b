"""Conversations for the demo model, made from reference entries, docstrings, snippets and text of our own."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ling_local.train import persona
from ling_local.train.documents import Document
from ling_local.train.reference import Entry, describe, first_sentences, plain
from ling_local.train.snippets import Snippet
from ling_local.train.vocab import EOS

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are Ling.",
    "You are a Python programmer.",
    "Answer in whole sentences.",
    "You help people who write Python.",
    "Be brief.",
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One question with its answer; thought is what a thinking model says first."""

    question: str
    answer: str
    thought: str


def render(turns: Iterable[Turn], thinking: bool, system: str = "") -> str:
    """A conversation as the chat template writes it (ling3-model.md section 10)."""
    head = f"{system}\n" if system else ""
    text = f"<role>SYSTEM</role>{head}detailed thinking {'on' if thinking else 'off'}{EOS}"
    for turn in turns:
        thought = turn.thought if thinking else ""
        text += f"<role>HUMAN</role>{turn.question}{EOS}"
        text += f"<role>ASSISTANT</role>\n<think>{thought}</think>{turn.answer}{EOS}"
    return text


def make_chats(
    entries: list[Entry], snippets: list[Snippet], functions: list[Snippet], seed: int, rounds: int
) -> Iterator[str]:
    """Conversations without end in sight but for `rounds` passes over the entries, each with new phrasings."""
    rng = random.Random(seed)
    for _ in range(rounds):
        turns = [_about_entry(entry, entries, rng) for entry in entries]
        turns += [_about_entry(e, entries, rng) for e in entries if _is_common(e) for _ in range(6)]
        turns += [_about_snippet(snippet, rng) for snippet in rng.sample(snippets, min(len(snippets), 4000))]
        turns += [_about_snippet(snippet, rng) for snippet in rng.sample(functions, min(len(functions), 4000))]
        turns += [Turn(*item) for item in persona.conversations(rng, 2500)]
        rng.shuffle(turns)
        while turns:
            count = rng.choice((1, 1, 1, 1, 2, 3))
            group, turns = turns[:count], turns[count:]
            system = rng.choice(SYSTEM_TEXTS) if rng.random() < 0.25 else ""
            yield render(group, thinking=rng.random() < 0.4, system=system)


def _is_common(entry: Entry) -> bool:
    return entry.module in COMMON_MODULES or entry.module == ""


COMMON_MODULES = frozenset(
    [
        "os",
        "os.path",
        "sys",
        "re",
        "json",
        "math",
        "random",
        "itertools",
        "functools",
        "collections",
        "datetime",
        "time",
        "pathlib",
        "string",
        "shutil",
        "subprocess",
        "csv",
        "io",
        "glob",
        "copy",
        "statistics",
        "heapq",
        "bisect",
        "textwrap",
        "threading",
        "queue",
        "logging",
        "argparse",
        "contextlib",
        "dataclasses",
        "typing",
        "enum",
        "operator",
        "tempfile",
        "hashlib",
        "urllib.parse",
        "asyncio",
        "socket",
        "struct",
        "zlib",
        "gzip",
        "pickle",
        "sqlite3",
        "decimal",
        "fractions",
    ]
)

_KIND_WORDS = {
    "function": "function", "method": "method", "class": "class", "classmethod": "class method",
    "staticmethod": "static method", "attribute": "attribute", "data": "constant", "exception": "exception",
    "decorator": "decorator",
}  # fmt: skip


def _name_forms(entry: Entry, rng: random.Random) -> str:
    """The name as a person would write it."""
    call = entry.kind in ("function", "method", "classmethod", "staticmethod")
    name = entry.name if rng.random() < 0.75 or entry.kind in ("method", "attribute") else entry.short
    return rng.choice((name, name, f"`{name}`", f"{name}()" if call else name))


def _about_entry(entry: Entry, entries: list[Entry], rng: random.Random) -> Turn:
    """A question about one entry. Names found in several modules are asked for with their module."""
    kind = _KIND_WORDS[entry.kind]
    article = "an" if kind[0] in "aeiou" else "a"
    thing = entry.kind in ("class", "exception", "attribute", "data")
    described = describe(entry.name, entry.text, noun=thing) or f"`{entry.name}` is {article} {kind}. {entry.text}"
    where = f" in the `{entry.module}` module" if entry.module and "." not in entry.module else ""
    form = _name_forms(entry, rng)
    choice = rng.random()
    if choice < 0.62:
        question = rng.choice(_WHAT).format(form)
        answer = described
        if rng.random() < 0.25 and "(" in entry.signature:
            answer += f" It is called as `{entry.signature}`."
        if entry.example and rng.random() < 0.5:
            answer += f" For example:\n\n```python\n{entry.example}\n```"
        thought = f"The user asks about {entry.name}, {article} {kind}{where}. I will say what it does."
    elif choice < 0.76 and "(" in entry.signature:
        question = rng.choice(_HOW).format(form)
        answer = f"Call it as `{entry.signature}`. {described}"
        if entry.example:
            answer += f" For example:\n\n```python\n{entry.example}\n```"
        thought = f"The user wants to use {entry.name}. I will show how it is called."
    elif choice < 0.88 and entry.module and not thing and describe(entry.name, entry.text) and len(entry.text) < 200:
        sentence = re.split(r"(?<=[.])\s", entry.text)[0]
        task = sentence[0].lower() + sentence[1:].rstrip(".")
        question = rng.choice(_WHICH).format(kind=kind, task=task)
        answer = f"Use `{entry.name}`. {described}"
        thought = f"The user looks for a {kind}. {entry.name} fits."
    elif entry.module and "." not in entry.module:
        question = rng.choice(_WHERE).format(entry.short)
        answer = f"`{entry.short}` is{where}. {described}"
        thought = f"The user asks where {entry.short} is. It is in {entry.module}."
    else:
        question, answer = rng.choice(_WHAT).format(form), described
        thought = f"This is about {entry.name}. I will say what it is."
    return Turn(_spell(question, rng), answer, thought)


_WHAT = (
    "What does {} do?", "What does {} do in Python?", "what does {} do", "What is {}?", "what is {}", "What is {} for?",
    "Explain {}.", "Explain {} to me, please.", "Can you explain {}?", "Tell me about {}.", "tell me about {}", "{}?",
    "Describe {}.", "What happens when I call {}?", "I do not understand {}.", "In Python, what does {} do?",
    "What's {}?", "What is the purpose of {}?", "Please explain what {} does.", "{} what does it do?",
)  # fmt: skip
_HOW = (
    "How do I use {}?", "how do i use {}", "How is {} used?", "Show me how to use {}.", "How do I call {}?",
    "Give me an example of {}.", "What are the arguments of {}?", "What arguments does {} take?", "How does {} work?",
    "What is the signature of {}?", "Can you show me {}?",
)  # fmt: skip
_WHICH = (
    "Which {kind} do I use to {task}?", "How do I {task}?", "how do i {task}", "How can I {task}?",
    "How do I {task} in Python?", "I want to {task}. What should I use?", "Is there a {kind} for this: {task}?",
    "What can I use to {task}?", "How would you {task}?",
)  # fmt: skip
_WHERE = (
    "Where is {}?",
    "Which module has {}?",
    "In which module is {}?",
    "Where do I find {}?",
    "What module is {} in?",
)


def _spell(question: str, rng: random.Random) -> str:
    """People do not always write a capital letter or a full stop."""
    if rng.random() < 0.12:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.1:
        question = question.rstrip(".?")
    return question


def _about_snippet(snippet: Snippet, rng: random.Random) -> Turn:
    """A request for a function, or a question about one."""
    task = snippet.task
    code = f"```python\n{snippet.code.strip()}\n```"
    if rng.random() < 0.75:
        question = rng.choice(_WRITE).format(task=task[0].lower() + task[1:].rstrip("."))
        answer = rng.choice(("{code}", "Here is one:\n\n{code}", "This function does that:\n\n{code}")).format(
            code=code
        )
        thought = rng.choice(
            ("The user wants a function. I will write it with a short body.", "This needs a small function.")
        )
        return Turn(_spell(question, rng), answer, thought)
    question = rng.choice(("What does this code do?", "Explain this function.", "What is this?", "Explain this code:"))
    task = task if task.endswith(".") else task + "."
    answer = describe(snippet.name, task) or f"`{snippet.name}` does this: {task}"
    return Turn(f"{question}\n\n{code}", answer, "I will read the code and say what it is for.")


_WRITE = (
    "Write a function to {task}.", "Write a Python function to {task}.", "write a function to {task}",
    "Can you write code to {task}?", "Please write a function to {task}.", "I need a function to {task}.",
    "Give me Python code to {task}.", "Show me code to {task}.", "Write code to {task}.",
)  # fmt: skip


def extract_functions(documents: Iterable[Document], limit: int) -> list[Snippet]:
    """Short documented functions of training files, as documents and tasks of their own."""
    found: dict[str, Snippet] = {}
    for document in documents:
        if document.kind != "code" or "/test" in document.path or len(document.text) > 60_000:
            continue
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        lines = document.text.split("\n")
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                snippet = _function_snippet(node, lines)
                if snippet is not None:
                    found.setdefault(snippet.name, snippet)
        if len(found) >= limit:
            break
    return list(found.values())


def _function_snippet(node: ast.FunctionDef, lines: list[str]) -> Snippet | None:
    size = (node.end_lineno or node.lineno) - node.lineno
    doc = ast.get_docstring(node)
    if not doc or not 2 <= size <= 24 or node.name.startswith("test"):
        return None
    task = first_sentences(doc.split("\n"), limit=140)
    code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    if not task or not describe(node.name, plain(task)):
        return None
    return Snippet(node.name, task, code + "\n")
