"""How much of a growing conversation `ling serve` reads anew: starts a server, asks, and prints a table in Markdown.

    python docs/measure_serving.py [arguments of `ling serve`]

Of an answer only its content is sent back, without the thinking, as most clients do.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

TEXT = Path(__file__).parents[1] / "ling_local" / "text" / "stops.py"
QUESTIONS = (
    "Who are you?",
    "What does str.split do?",
    "How do I use itertools.chain?",
    "What is a deque?",
    "What does os.path.join do?",
    "How do I sort a list?",
)


def ask(url: str, messages: list[dict[str, str]]) -> dict[str, Any]:
    """One call; the answer."""
    body = json.dumps({"messages": messages, "max_tokens": 150, "temperature": 0}).encode()
    with urlopen(Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})) as reply:
        return json.load(reply)


def row(name: str, answer: dict[str, Any]) -> str:
    """A line of the table."""
    usage = answer["usage"]
    num, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    times = f"{usage['ling']['prefill_ms']:.0f} ms | {usage['ling']['ttft_ms']:.0f} ms"
    return f"| {name} | {num} | {cached} | {num - cached} | {times} | {usage['completion_tokens']} |"


def measure(url: str) -> None:
    """The calls of one conversation, and the last one once more where its first word differs."""
    messages = [
        {"role": "system", "content": f"Answer questions about this file.\n\n{TEXT.read_text(encoding='utf-8')}"}
    ]
    thoughts: list[str] = []
    print("| call | prompt tokens | cached | new | prefill | TTFT | tokens made |\n|---|---|---|---|---|---|---|")
    for number, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        answer = ask(url, messages)
        print(row(str(number), answer), flush=True)
        said = answer["choices"][0]["message"]
        messages.append({"role": "assistant", "content": said["content"]})
        thoughts.append(said.get("reasoning_content", ""))
    messages.pop()
    # Another first word, so that nothing of it is cached; and since the server then knows none of the turns, with the
    # thinking that it would have put back.
    messages[0] = {"role": "system", "content": f"Please a{messages[0]['content'][1:]}"}
    for message, thought in zip(messages[2::2], thoughts, strict=False):
        message["reasoning_content"] = thought
    print(row(f"{len(QUESTIONS)}, cold", ask(url, messages)))


def main() -> None:
    """Start the server, measure, stop it."""
    command = [sys.executable, "-m", "ling_local", "serve", "--port", "0", *sys.argv[1:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                if found := re.search(r"is ready at (\S+)", line):
                    measure(found[1])
                    return
                print(line, end="", file=sys.stderr)
        finally:
            server.terminate()
    sys.exit("the server did not start")


if __name__ == "__main__":
    main()
