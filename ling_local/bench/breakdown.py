"""A step op by op: asked of a process that has torch, as everything that needs it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ling_local.bench.machine import machine
from ling_local.bench.report import head
from ling_local.engine.protocol import EngineSpec
from ling_local.errors import EngineError, OutOfMemory, UsageError

_KINDS = {kind.__name__: kind for kind in (UsageError, OutOfMemory)}


def run_breakdown(spec: EngineSpec, context: int, tell: Callable[[str], None], command: str = "") -> dict[str, Any]:
    """The document of `engine/breakdown.py` for a dummy: plain step, drafted step, each op with its bytes and times.

    tell: is given lines on how far it is; command: what to type to have it again.
    Raises what the process failed with, as far as that can be told.
    """
    asked = json.dumps({"spec": asdict(spec), "context": context})
    program = [sys.executable, "-P", "-m", "ling_local.engine.breakdown", asked]
    result: dict[str, Any] = {}
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
            for line in process.stdout:
                message = json.loads(line)
                if "progress" in message:
                    tell(message["progress"])
                else:
                    result = message
        errors.seek(0)
        trace = errors.read().decode("utf-8", "replace")
    if "error" in result:
        kind = _KINDS.get(result["error"]["kind"], EngineError)
        raise kind(result["error"]["message"], result["error"]["hint"])
    if process.returncode or not result:
        error = EngineError(
            f"the breakdown ended with exit code {process.returncode}", "Run it with --debug to see the trace."
        )
        error.add_note(trace)
        raise error
    return {**head(command), "machine": machine(), **result}
