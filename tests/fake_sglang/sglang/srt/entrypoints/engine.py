"""The offline engine: a loop, a tokenizer manager that can abort, and a child process that ends with shutdown."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from sglang.srt.server_args import FACTS

STEP_S = 0.001
FIRST_ID = 10


class TokenizerManager:
    """Knows the requests that run; an unknown or finished one is ignored, as by the real one."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, asyncio.Event] = {}

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        state = self.rid_to_state.get(rid)
        if state is not None:
            state.set()


class Engine:
    def __init__(self, server_args: Namespace) -> None:
        self.args = server_args
        if server_args.speculative_algorithm == "NGRAM":
            raise ValueError("Ngram speculative decoding is not for this model.")
        self.draft = _draft_tokens(server_args)
        self.context = int(server_args.context_length or 8192)
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = TokenizerManager()
        sleep = "import time; time.sleep(600)"
        self.scheduler = subprocess.Popen([sys.executable, "-c", sleep], stdin=subprocess.DEVNULL)
        if "FAKE_SGLANG_NOTES" in os.environ:  # for tests that look at it from outside
            notes = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")}
            Path(os.environ["FAKE_SGLANG_NOTES"]).write_text(json.dumps({"child": self.scheduler.pid, **notes}))

    def get_server_info(self) -> dict[str, Any]:
        return {
            "tp_size": int(self.args.tp_size or 1),
            "speculative_algorithm": {"NEXTN": "EAGLE"}.get(self.args.speculative_algorithm)
            or self.args.speculative_algorithm,
            "speculative_num_draft_tokens": self.draft,
            "max_req_input_len": self.context,
        }

    def generate(
        self,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[int] | None = None,
        stream: bool = False,
        rid: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        assert stream
        assert self.args.skip_tokenizer_init
        assert self.args.incremental_streaming_output
        assert input_ids is not None
        assert rid is not None
        assert set(sampling_params or {}) <= set(FACTS["sampling"])
        made = self._run(input_ids, sampling_params or {}, rid)

        def chunks() -> Iterator[dict[str, Any]]:
            while True:
                try:
                    yield self.loop.run_until_complete(made.__anext__())
                except StopAsyncIteration:
                    return

        return chunks()

    async def _run(self, ids: list[int], params: dict[str, Any], rid: str) -> AsyncIterator[dict[str, Any]]:
        if len(ids) + params["max_new_tokens"] > self.context:
            raise ValueError(f"Requested token count exceeds the context length of {self.context} tokens.")
        aborted = self.tokenizer_manager.rid_to_state[rid] = asyncio.Event()
        count, step, finish = 0, 0, None
        stops = set() if params["ignore_eos"] else set(params.get("stop_token_ids", ()))
        while finish is None:
            await asyncio.sleep(STEP_S)
            width = 1 if step == 0 else 1 + step % (self.draft or 1)
            block = [FIRST_ID + count + index for index in range(width)][: params["max_new_tokens"] - count]
            cut = next((index + 1 for index, token in enumerate(block) if token in stops), None)
            count, step = count + len(block[:cut]), step + 1
            if cut is not None:
                finish = {**FACTS["finish"]["eos"], "matched": block[cut - 1]}
            elif count == params["max_new_tokens"]:
                finish = {**FACTS["finish"]["length"], "length": count}
            elif aborted.is_set():
                count, block, finish = count - len(block), [], FACTS["finish"]["cancelled"]
            if finish is not None:
                del self.tokenizer_manager.rid_to_state[rid]
            meta = {"id": rid, "finish_reason": finish, "prompt_tokens": len(ids), "cached_tokens": 0}
            yield {"output_ids": block[:cut], "meta_info": {**meta, "completion_tokens": count}}

    def shutdown(self) -> None:
        self.scheduler.kill()
        self.scheduler.wait()


def _draft_tokens(args: Namespace) -> int | None:
    if args.speculative_algorithm == "DSPARK":
        return int(args.speculative_dspark_block_size or 8) + 1
    return int(args.speculative_num_draft_tokens) if args.speculative_algorithm else None
