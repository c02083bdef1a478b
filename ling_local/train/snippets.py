"""Small self-contained functions of our own writing, varied in names, hints and docstrings.

They teach the demo model to continue short snippets that come with nothing before them.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

_TABLES = Path(__file__).parent / "tables"
ARGUMENTS = {
    "NUM": ("a b x y n m number value num first second left right", "int float"),
    "INT": ("n k m count limit number num size low high", "int"),
    "RADIUS": ("r radius", "float"),
    "SIZE": ("width height w h length a b", "float int"),
    "POINT": ("p q a b first second start end", "tuple"),
    "STR": ("s text string word t sentence value name line", "str"),
    "NAME": ("name person user who", "str"),
    "NUMS": ("numbers values nums xs data items lst", "list[int] list[float] list"),
    "LIST": ("items values lst data array sequence elements xs", "list"),
    "TARGET": ("target item value x key", "int"),
    "DICT": ("d data mapping values table counts", "dict dict[str,int]"),
    "WORDS": ("words names strings", "list[str]"),
    "PATH": ("path filename file_name folder", "str"),
    "DATA": ("data obj value content", "dict"),
    "YEAR": ("year y", "int"),
    "MATRIX": ("matrix m rows a b left right", "list[list[float]] list"),
    "FUNC": ("func function f callback", "Callable"),
}
ITEMS = ("x", "item", "value", "number", "n", "element", "i")
MODULES = ("math", "json", "csv", "os", "random", "string", "time")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A small piece of code with its name and what it does, as one imperative sentence."""

    name: str
    task: str
    code: str


def read_table(name: str) -> list[str]:
    """The lines of a table of ours, comments left out, with \\n as a real newline."""
    lines = (_TABLES / name).read_text(encoding="utf-8").splitlines()
    return [line.replace("\\n", "\n") for line in lines if line and not line.startswith("# ")]


def make_snippets(seed: int, rounds: int) -> list[Snippet]:
    """`rounds` variants of every template, no two alike."""
    rng = random.Random(seed)
    found: dict[str, Snippet] = {}
    functions, classes = read_table("functions.txt"), read_table("classes.txt")
    for _ in range(rounds):
        for line in functions:
            snippet = _function(line, rng)
            found.setdefault(snippet.code, snippet)
        for line in classes:
            snippet = _class(line, rng)
            found.setdefault(snippet.code, snippet)
    return list(found.values())


def make_files(snippets: list[Snippet], seed: int, count: int) -> list[str]:
    """Documents of one to five snippets, some with a main part, as a person's small file would be."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        chosen = rng.sample(snippets, rng.choice((1, 1, 1, 2, 3, 5)))
        body = "\n\n".join(snippet.code for snippet in chosen)
        used = [name for name in MODULES if re.search(rf"\b{name}\.", body)]
        head = "".join(f"import {name}\n" for name in used) + ("\n\n" if used else "")
        if rng.random() < 0.15:
            head = f'"""{chosen[0].task}"""\n\n' + head
        texts.append(head + body + (_main(chosen[-1], rng) if rng.random() < 0.3 else ""))
    return texts


def _main(snippet: Snippet, rng: random.Random) -> str:
    match = re.match(r"def (\w+)\(([^)]*)\)", snippet.code)
    if match is None:
        return ""
    values = []
    for argument in filter(None, match[2].split(",")):
        name = argument.split(":")[0].strip()
        values.append(_example_value(name, rng))
    call = f"{match[1]}({', '.join(values)})"
    show = call if "print(" in snippet.code else f"print({call})"
    if rng.random() < 0.5:
        return f'\n\nif __name__ == "__main__":\n    {show}\n'
    return f"\n\n{show}\n"


def _example_value(name: str, rng: random.Random) -> str:
    for group, (names, _) in ARGUMENTS.items():
        if name in names.split():
            if group in ("NUMS", "LIST"):
                return "[" + ", ".join(str(rng.randint(1, 20)) for _ in range(rng.randint(3, 5))) + "]"
            if group in ("STR", "NAME"):
                return rng.choice(('"hello"', '"hello world"', '"Ling"', '"racecar"', '"Python"', '"Anna"'))
            if group == "PATH":
                return rng.choice(('"data.txt"', '"."', '"data.json"'))
            if group == "DICT":
                return '{"a": 1, "b": 2}'
            if group == "WORDS":
                return '["apple", "pear", "avocado"]'
            if group == "YEAR":
                return str(rng.randint(1990, 2030))
    return str(rng.randint(1, 20))


def _function(line: str, rng: random.Random) -> Snippet:
    task, names, kinds, body = line.split("|")
    name = rng.choice(names.split(","))
    hinted = rng.random() < 0.35
    taken: list[str] = []
    parameters = []
    for kind in kinds.split(","):
        options, hints = ARGUMENTS[kind]
        words = options.split()
        free = [word for word in words[: 4 if rng.random() < 0.6 else len(words)] if word not in taken]
        word = free[len(taken)] if kind == "NUM" and rng.random() < 0.3 and len(free) > len(taken) else rng.choice(free)
        if kind == "NUM" and len(taken) == 1 and taken[0] in ("a", "x", "first", "left"):
            word = {"a": "b", "x": "y", "first": "second", "left": "right"}[taken[0]]
        taken.append(word)
        hint = rng.choice(hints.split()).replace(",", ", ")
        parameters.append(f"{word}: {hint}" if hinted and kind != "FUNC" else word)
    text = body.replace("@F", name)
    item = rng.choice([item for item in ITEMS if item not in taken])
    text = text.replace("@ITEM", item)
    for letter, word in zip("abc", taken, strict=False):
        text = text.replace(f"${letter}", word)
    doc = _docstring(task, rng)
    returns = _return_hint(text, kinds) if hinted else ""
    lines = [
        f"def {name}({', '.join(parameters)}){returns}:",
        *doc,
        *(f"    {row}" if row else "" for row in text.split("\n")),
    ]
    if rng.random() < 0.06 and not doc:
        lines.insert(0, f"# {task}")
    return Snippet(name, task, "\n".join(lines) + "\n")


def _docstring(task: str, rng: random.Random) -> list[str]:
    if rng.random() < 0.45:
        return []
    if rng.random() < 0.12:
        return [f'    """{task.rstrip(".")}"""']
    return [f'    """{task}"""'] + ([""] if rng.random() < 0.08 else [])


def _return_hint(text: str, kinds: str) -> str:
    if "return" not in text:
        return " -> None" if "yield" not in text else ""
    if re.search(r"return (True|False|not |all\(|sorted\(.*==|.* == |len\(set)", text):
        return " -> bool"
    if "return [" in text or ("return result" in text and "append" in text):
        return " -> list"
    if re.search(r'return (f"|" |"")', text) or "join(" in text:
        return " -> str"
    return {"NUM": " -> float", "INT": " -> int", "STR": " -> str"}.get(kinds.split(",")[0], "")


def _class(line: str, rng: random.Random) -> Snippet:
    task, names, fields, body = line.split("|")
    name = rng.choice(names.split(","))
    members = fields.split(",")
    doc = [f'    """{task}"""', ""] if rng.random() < 0.5 else []
    methods = body.replace("Node(", f"{name}(").split("\n")
    if members in (["items"], ["count"]):
        start = ["    def __init__(self):", f"        self.{members[0]} = {'[]' if members == ['items'] else '0'}"]
    else:
        last = rng.random() < 0.3 and members[-1] in ("next", "balance", "speed", "y")
        default = {"next": "None", "balance": "0", "speed": "0", "y": "0"}
        shown = [*members[:-1], f"{members[-1]}={default[members[-1]]}"] if last else members
        start = [f"    def __init__(self, {', '.join(shown)}):"]
        start += [f"        self.{member} = {member}" for member in members]
    lines = [f"class {name}:", *doc, *start, "", *(f"    {row}" if row else "" for row in methods)]
    return Snippet(name, task, "\n".join(lines) + "\n")
