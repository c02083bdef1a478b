"""Entries of Python's library reference (reST) as plain sentences: name, signature, what it does."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ling_local.train.documents import Document

_KINDS = ("function", "method", "class", "classmethod", "staticmethod", "attribute", "data", "exception", "decorator")
_DIRECTIVE = re.compile(rf"^( *)\.\. (?:\w+:)?(?:awaitable)?({'|'.join(_KINDS)}):: *(.+)$")
_MODULE = re.compile(r"^\.\. (?:module|currentmodule):: *([\w.]+)", re.M)
_ROLE = re.compile(r":[\w:]+:`([^`]*)`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_+")
_FIRST_WORD = re.compile(r"^([A-Z][a-z]*)\b")
# Imperatives that open reference texts and their third person, so that an answer can be a whole sentence.
_VERBS = {
    "Return": "returns", "Convert": "converts", "Create": "creates", "Test": "tests", "Write": "writes",
    "Read": "reads", "Remove": "removes", "Set": "sets", "Get": "gets", "Open": "opens", "Close": "closes",
    "Send": "sends", "Print": "prints", "Compute": "computes", "Make": "makes", "Add": "adds", "Raise": "raises",
    "Run": "runs", "Execute": "executes", "Call": "calls", "Register": "registers", "Change": "changes",
    "Check": "checks", "Compare": "compares", "Copy": "copies", "Decode": "decodes", "Encode": "encodes",
    "Delete": "deletes", "Determine": "determines", "Display": "displays", "Parse": "parses", "Split": "splits",
    "Find": "finds", "Format": "formats", "Generate": "generates", "Insert": "inserts", "Join": "joins",
    "Load": "loads", "Move": "moves", "Perform": "performs", "Search": "searches", "Start": "starts",
    "Stop": "stops", "Wait": "waits", "Yield": "yields", "Append": "appends", "Extract": "extracts",
    "Extend": "extends", "Fetch": "fetches", "Fill": "fills", "Flush": "flushes", "Reset": "resets",
    "Replace": "replaces", "Rename": "renames", "Retrieve": "retrieves", "Reverse": "reverses", "Save": "saves",
    "Serialize": "serializes", "Sort": "sorts", "Store": "stores", "Update": "updates", "Apply": "applies",
    "Schedule": "schedules", "Receive": "receives", "Construct": "constructs", "Build": "builds",
    "Determines": "determines", "Returns": "returns", "Signal": "signals", "Cancel": "cancels", "Clear": "clears",
    "Connect": "connects", "Configure": "configures", "Attempt": "attempts", "Acquire": "acquires",
    "Release": "releases", "Log": "logs", "Process": "processes", "Install": "installs", "List": "lists",
    "Multiply": "multiplies", "Divide": "divides", "Draw": "draws", "Emit": "emits", "Enable": "enables",
    "Disable": "disables", "Evaluate": "evaluates", "Expand": "expands", "Invoke": "invokes", "Match": "matches",
    "Wrap": "wraps", "Push": "pushes", "Round": "rounds", "Exit": "exits", "Try": "tries", "Pack": "packs",
    "Unpack": "unpacks", "Handle": "handles", "Assert": "asserts", "Query": "queries", "Block": "blocks",
    "Deserialize": "deserializes", "Concatenate": "concatenates", "Enter": "enters", "Lock": "locks",
    "Swap": "swaps", "Truncate": "truncates", "Dump": "dumps", "Calculate": "calculates", "Count": "counts",
    "Merge": "merges", "Validate": "validates", "Represent": "represents", "Specify": "specifies",
    "Indicate": "indicates", "Hold": "holds", "Contain": "contains", "Define": "defines", "Pop": "pops",
    "Use": "uses", "Look": "looks", "Seek": "seeks", "Shuffle": "shuffles", "Terminate": "terminates",
}  # fmt: skip

_THIRD_PERSON = frozenset(_VERBS.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One documented thing. text is one to three whole sentences; example is an interactive session or ""."""

    name: str
    signature: str
    kind: str
    module: str
    text: str
    example: str

    @property
    def short(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


def read_entries(documents: Iterable[Document]) -> list[Entry]:
    """Entries of all library pages among the documents, one per name."""
    found: dict[str, Entry] = {}
    for document in documents:
        if "/library/" in document.path and document.path.endswith((".rst", ".rst.txt")):
            for entry in parse_page(document.text):
                found.setdefault(entry.name, entry)
    return list(found.values())


def parse_page(text: str) -> list[Entry]:
    """All entries of one page that have a describing sentence."""
    lines = text.split("\n")
    modules = _MODULE.findall(text)
    module = modules[0] if modules else ""
    entries = []
    outer = ""
    for start, line in enumerate(lines):
        match = _DIRECTIVE.match(line)
        if match is None:
            continue
        indent, kind, signature = len(match[1]), match[2], match[3].strip().rstrip("\\").strip()
        name = re.sub(r"\(.*|\s.*|\[.*", "", signature)
        if not re.fullmatch(r"[\w.]+", name):
            continue
        if indent == 0 and kind in ("class", "exception"):
            outer = name
        if indent > 0 and "." not in name and outer:
            name = f"{outer}.{name}"
        body = _body(lines, start + 1, indent)
        sentences = first_sentences(body)
        if sentences:
            full = name if not module or name.startswith(module + ".") else f"{module}.{name}"
            example = _example(body)
            entries.append(Entry(full, signature, kind, module, sentences, example))
    return entries


def plain(text: str) -> str:
    """reST markup out, words in: roles and literals become backquoted names, emphasis is dropped."""
    text = _ROLE.sub(lambda m: "`" + re.sub(r"\s*<.*?>$", "", m[1]).lstrip("~!") + "`", text)
    text = _LINK.sub(r"\1", text)
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    text = re.sub(r"\*\*(.+?)\*\*", r"\1", text)
    text = re.sub(r"(?<![\w*`])\*([\w\s]+?)\*(?![\w*`])", r"`\1`", text)
    text = re.sub(r"\|([\w -]+)\|", r"\1", text)
    text = text.replace("*\\ `", "`*").replace("\\ ", "").replace("\\*", "*").replace("`:const:", "`")
    return re.sub(r"\s+", " ", text).strip()


def first_sentences(body: list[str], limit: int = 320) -> str:
    """The first paragraph as one to three sentences, or "" if it is no plain prose."""
    paragraph: list[str] = []
    for line in body:
        stripped = line.strip()
        if not stripped and paragraph:
            break
        if stripped:
            paragraph.append(stripped)
    text = " ".join(paragraph)
    if not text or text.startswith(("..", ">>>", ":", "*", "-", "+", "#", "=", "|")):
        return ""
    text = plain(text)
    if text.endswith(":"):
        text = re.sub(r"(?<=[.!?]) [^.!?]*:$", "", text)
    kept = ""
    for sentence in re.split(r"(?<!e\.g\.)(?<!i\.e\.)(?<=[.!?])\s+(?=[A-Z`])", text):
        if kept and len(kept) + len(sentence) > limit:
            break
        kept = f"{kept} {sentence}".strip()
    good = kept.endswith((".", "!", "?")) and 15 <= len(kept) <= 480 and "::" not in kept
    return kept if good and not re.search(r"\bsee (below|above)\b", kept) else ""


def describe(name: str, text: str, noun: bool = False) -> str:
    """The text as a sentence about `name`: "Return x." becomes "`name` returns x."; "" if that is not possible.

    noun: the name stands for a thing, so "A point." becomes "`name` is a point."
    """
    match = _FIRST_WORD.match(text)
    if match is None:
        return ""
    word, rest = match[1], text[match.end() :]
    if word in _VERBS:
        return f"`{name}` {_VERBS[word]}{rest}"
    if word.lower() in _THIRD_PERSON:
        return f"`{name}` {word.lower()}{rest}"
    if word in ("Raised", "Called", "Used") or (noun and word in ("A", "An", "The", "One", "Subclass")):
        return f"`{name}` is {'a ' if word == 'Subclass' else ''}{word.lower()}{rest}"
    return ""


def _body(lines: list[str], start: int, indent: int) -> list[str]:
    body = []
    for line in lines[start : start + 60]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        body.append(line)
    # further signatures of the same entry, and options of the directive, come before the first empty line
    while body and body[0].strip():
        body.pop(0)
    for i, line in enumerate(body):
        if i and _DIRECTIVE.match(line):
            return body[:i]
    return body


def _example(body: list[str]) -> str:
    """The first interactive example, dedented, at most 8 lines."""
    lines: list[str] = []
    for line in body:
        stripped = line.strip()
        if stripped.startswith(">>>") or (lines and stripped):
            lines.append(line)
        elif lines:
            break
    if not 1 <= len(lines) <= 8 or not lines[0].strip().startswith(">>>"):
        return ""
    margin = len(lines[0]) - len(lines[0].lstrip())
    return "\n".join(line[margin:] for line in lines)
