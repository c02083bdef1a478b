"""Our engine on the real front of SGLang, with a counter in place of the scheduler that would need a GPU.

    python tests/sglang_front.py [off|mtp|dspark]

Everything on this side of a GPU is SGLang's own: flags and their resolution, Engine, TokenizerManager, the messages
between processes, aborts, shutdown. Run it with a Python that has ling_local and sglang; exit code 0 if all is well.
The stand-in package in fake_sglang/ was made to behave as this does.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

FIRST_ID = 10
STEP_S = 0.003
CONTEXT = 506
PROMPT = (3, 1, 4, 1, 5)


@dataclass(slots=True)
class Job:
    """A request that runs: what was asked, and how far it is."""

    rid: str
    params: Any
    num_prompt: int
    widest: int
    made: int = 0
    step: int = 0


def scheduler(server_args: Any, port_args: Any, gpu: int, tp: int, pp: int, dp: int | None, ready: Any) -> None:
    """Body of the scheduler process: says that it is ready, then counts for one request after the other."""
    import zmq
    from sglang.srt.managers import io_struct
    from sglang.srt.utils.common import kill_itself_when_parent_died
    from sglang.srt.utils.network import get_zmq_socket

    kill_itself_when_parent_died()
    context = zmq.Context(2)
    inbox = get_zmq_socket(context, zmq.PULL, port_args.scheduler_input_ipc_name, False)
    outbox = get_zmq_socket(context, zmq.PUSH, port_args.tokenizer_ipc_name, False)
    ready.send({"status": "ready", "max_total_num_tokens": 4096, "max_req_input_len": CONTEXT, "startup_time": {}})
    job: Job | None = None
    aborted: set[str] = set()
    while True:
        while inbox.poll(0 if job else 1000):
            message = io_struct.sock_recv(inbox)
            if isinstance(message, io_struct.TokenizedGenerateReqInput):
                widest = 4 if server_args.speculative_algorithm else 1
                job = Job(message.rid, message.sampling_params, len(message.input_ids), widest)
            elif isinstance(message, io_struct.AbortReq):
                aborted.add(message.rid)
            elif isinstance(message, io_struct.GetInternalStateReq):
                io_struct.sock_send(outbox, io_struct.GetInternalStateReqOutput(internal_state={}))
        if job is not None:
            time.sleep(STEP_S)
            ids, finish = advance(job, job.rid in aborted)
            io_struct.sock_send(outbox, output(job, ids, finish))
            job = None if finish else job


def advance(job: Job, aborted: bool) -> tuple[list[int], dict[str, Any] | None]:
    """The ids of one step, one in the first, and SGLang's reason to end."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, FINISH_MATCHED_TOKEN

    width = 1 if job.step == 0 else 1 + job.step % job.widest
    room = job.params.max_new_tokens - job.made
    ids = [FIRST_ID + job.made + index for index in range(width)][:room]
    stops = () if job.params.ignore_eos else job.params.stop_token_ids or ()
    cut = next((index + 1 for index, token in enumerate(ids) if token in stops), None)
    ids = [] if aborted else ids[:cut]
    job.made, job.step = job.made + len(ids), job.step + 1
    if aborted:
        return ids, FINISH_ABORT().to_json()
    if cut is not None:
        return ids, FINISH_MATCHED_TOKEN(ids[-1]).to_json()
    return ids, FINISH_LENGTH(job.made).to_json() if job.made >= job.params.max_new_tokens else None


def output(job: Job, ids: list[int], finish: dict[str, Any] | None) -> Any:
    """The message of one step; what it must have and we do not use is left empty."""
    import msgspec
    from sglang.srt.managers.io_struct import BatchTokenIDOutput

    required = [field.name for field in msgspec.structs.fields(BatchTokenIDOutput) if field.required]
    values: dict[str, Any] = {name: [[]] if "logprob" in name else None for name in required}
    verified = job.step - 1
    values |= {
        "rids": [job.rid],
        "http_worker_ipcs": [None],
        "finished_reasons": [finish],
        "decoded_texts": [""],
        "decode_ids": [array("q", ids)],
        "read_offsets": [0],
        "output_ids": [array("q", ids)],
        "skip_special_tokens": [True],
        "spaces_between_special_tokens": [True],
        "no_stop_trim": [False],
        "prompt_tokens": [job.num_prompt],
        "reasoning_tokens": [0],
        "completion_tokens": [job.made],
        "cached_tokens": [0],
        "retraction_counts": [0],
        "spec_verify_ct": [verified],
        "spec_num_correct_drafts": [max(job.made - job.step, 0)],
        "spec_correct_drafts_histogram": [[0]],
    }
    return BatchTokenIDOutput(**values)


def check(engine: Any) -> Iterator[str]:
    """What must hold; a line for each part of it."""
    from ling_local.types import FinishReason, TokenRequest

    def run(num: int, *stops: int) -> tuple[list[int], list[Any]]:
        steps = list(engine.generate(TokenRequest(PROMPT, max_tokens=num, stop_ids=frozenset(stops))))
        return [token for step in steps for token in step.ids], steps

    ids, steps = run(40)
    assert ids == list(range(FIRST_ID, FIRST_ID + 40))
    assert steps[-1].finish is FinishReason.LENGTH
    assert (steps[0].prefilled, len(steps[0].ids), steps[0].drafted) == (len(PROMPT), 1, 0)
    yield f"40 ids in {len(steps)} steps"
    ids, steps = run(40, 23)
    assert ids == list(range(FIRST_ID, 24))
    assert steps[-1].finish is FinishReason.EOS
    yield "a stop id ends it, and is the last id"
    assert run(40, 99)[1][-1].finish is FinishReason.LENGTH
    early = engine.generate(TokenRequest(PROMPT, max_tokens=300))
    early.cancel()
    assert [step.finish for step in early] == [FinishReason.CANCELLED]
    running = engine.generate(TokenRequest(PROMPT, max_tokens=300))
    reasons = []
    for step in running:
        reasons.append(step.finish)
        if len(reasons) == 3:
            running.cancel()
    assert reasons[-1] is FinishReason.CANCELLED
    assert len(reasons) <= 6
    yield f"cancelled at step 3: over with step {len(reasons)}"
    other = engine.generate(TokenRequest(PROMPT, max_tokens=400))
    threading.Timer(0.05, other.cancel).start()
    assert list(other)[-1].finish is FinishReason.CANCELLED
    yield "cancelled from another thread"
    for _ in engine.generate(TokenRequest(PROMPT, max_tokens=300)):
        break
    assert run(9)[0] == list(range(FIRST_ID, FIRST_ID + 9))
    yield "left early, and free again"
    begun = time.monotonic()
    num = len(run(400)[1])
    yield f"a step takes {1000 * (time.monotonic() - begun) / num:.2f} ms, of which {1000 * STEP_S:g} asleep"


def main() -> None:
    """Load, check, close; see the top of this file."""
    from sglang.srt.entrypoints.engine import Engine

    from ling_local.engine.sglang.engine import SGLangEngine
    from sglang_stand_in import HOPPER, make_spec

    Engine.run_scheduler_process_func = staticmethod(scheduler)
    draft = sys.argv[1] if len(sys.argv) > 1 else "dspark"
    with tempfile.TemporaryDirectory() as folder:
        spec = replace(make_spec(Path(folder), draft, 0), passed=("device=cuda",))
        engine = SGLangEngine.load(spec, None, HOPPER)
        print(engine.info)
        for line in check(engine):
            print(line, flush=True)
        children = engine.offline.get_all_child_pids()
        engine.close()
        states = [Path(f"/proc/{pid}/stat") for pid in children]
        alive = [path for path in states if path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"]
        assert children
        assert not alive
        print(f"closed, and its {len(children)} processes with it")


if __name__ == "__main__":
    main()
