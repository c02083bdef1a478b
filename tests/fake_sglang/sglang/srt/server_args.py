"""Reads a command line as the real one does: the same flags, words after each, choices and error messages."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

FACTS = json.loads((Path(__file__).parents[3] / "sglang_facts.json").read_text(encoding="utf-8"))


def prepare_server_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang serve", add_help=False)
    for flag, takes in FACTS["options"].items():
        kind, _, choices = takes.partition(" ")
        if kind == "none":
            parser.add_argument(flag, action="store_true")
        else:
            words = {"one": None, "optional": "?", "many": "+"}[kind]
            parser.add_argument(flag, nargs=words, choices=choices.split("|") if choices else None)
    return parser.parse_args(argv)
