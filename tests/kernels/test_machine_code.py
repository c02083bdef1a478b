"""What only the machine code tells: weights are on their way before a kernel waits, then its tokens all at once.

An assembler that moves the wait up over the loads, or sends one load after the other, changes no result, only the
time. It has done both (kernels/README.md).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest

from ling_kernels.cuda.compile import units
from ling_kernels.cuda.dense import DOWN_FORMS

Compiled = Callable[[str, str], tuple[bytes, str]]

SHARED = 8  # of a tile of the shared expert
# 16-byte loads of a thread that stand before the wait: two weight rows of DEPTH chunks, or of each slot that down wants
EARLY = {
    "gemm": {f"{name}_{tokens}": 8 for name in ("linear", "mlp_gate_up", "head") for tokens in (8, 16)}
    | {"linear_normed": 8 + 2},  # and the residual stream, the norm's weight
    "route": {"router_8": 8, "router_16": 8}
    | {f"router_row_{parts}": [8, parts * SHARED] for parts in (1, 2)}
    | {"router_normed": [8 + 2, SHARED + 2]}
    | {f"{name}_{tokens}": SHARED for name in ("route_select", "route_plan") for tokens in (8, 16)},
    "part": {f"{name}_{tokens}": 8 for name in ("linear_part", "linear_part_normed") for tokens in (8, 16)},
    "moe": {f"experts_down_{8 * at}_{slots}": 2 * slots for at, forms in enumerate(DOWN_FORMS, 1) for slots in forms},
}
WIDE = re.compile(r"LDG\S*\.128")
NOT_THE_PLAN = re.compile(r"LDG(?!\S*STRONG)\S*\.128")  # which is read before the wait too, from L2
TOGETHER = 3  # loads that are sent after it before the first product waits for one


def disassembled(cubin: bytes, folder: Path) -> dict[str, list[str]]:
    """Instructions by kernel."""
    package = distribution("nvidia-cuda-nvdisasm")
    program = next(package.locate_file(f) for f in package.files if f.name == "nvdisasm")
    path = folder / "unit.cubin"
    path.write_bytes(cubin)
    text = subprocess.run([program, "-c", path], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"^\.text\.(\w+):$", text, flags=re.MULTILINE)
    return {
        name: re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", body)
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def ways(code: list[str]) -> list[list[str]]:
    """Parts of a kernel that wait and then multiply: blocks of one launch may go different ways."""
    ends = [i for i, line in enumerate(code) if line.startswith("EXIT")]
    parts = [code[a:b] for a, b in zip([0, *ends], [*ends, len(code)], strict=True)]
    return [part for part in parts if all(what in "".join(part) for what in ("ACQBULK", "HMMA"))]


def wait_in(code: list[str]) -> int:
    """Where a kernel first waits for the one before it."""
    return next(i for i, line in enumerate(code) if "ACQBULK" in line)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("unit", EARLY)
def test_weights_are_asked_for_before_the_wait(unit: str, arch: str, tmp_path: Path, compiled: Compiled) -> None:
    kernels = disassembled(compiled(unit, arch)[0], tmp_path)
    for name, wanted in EARLY[unit].items():
        code = kernels[name]
        weights = NOT_THE_PLAN if "down" in name else WIDE
        found = []
        for way in ways(code):
            wait, product = (next(i for i, line in enumerate(way) if what in line) for what in ("ACQBULK", "HMMA"))
            found.append(sum(bool(weights.search(line)) for line in way[:wait]))
            together = sum(bool(WIDE.search(line)) for line in way[wait:product])
            assert together >= TOGETHER, f"{name} on {arch}: {together} loads before the first product"
        assert sorted(found) == (wanted if isinstance(wanted, list) else [wanted]), (
            f"{name} on {arch}: loads before the wait"
        )


# Kernels that let the next one start before they wait. What is settled by the others' doing so later is read early.
STARTS_NEXT_EARLY = re.compile(
    r"embed_norm|exchange_norm(_\d)?|linear_normed|route[r_]\w+|kda_(verify|follow)_\w+|mla_\w+|sample_(verdict_best|advance)"
)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("unit", units())
def test_no_other_kernel_lets_the_next_one_start_before_it_waits(
    unit: str, arch: str, tmp_path: Path, compiled: Compiled
) -> None:
    for name, code in disassembled(compiled(unit, arch)[0], tmp_path).items():
        steps = "".join("W" if "ACQBULK" in line else "L" for line in code if re.search("ACQBULK|PREEXIT", line))
        early = STARTS_NEXT_EARLY.fullmatch(name)
        assert steps.startswith("LW") if early else re.fullmatch("(WL)+", steps), f"{name} on {arch}: {steps}"
        wait = wait_in(code)
        assert not any(re.search(r"\bSTG|\bRED\b|\bATOMG", line) for line in code[:wait]), f"{name} on {arch} writes"


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_a_shared_tile_of_one_row_is_one_trip_for_its_tokens(arch: str, tmp_path: Path, compiled: Compiled) -> None:
    kernels = disassembled(compiled("route", arch)[0], tmp_path)
    for parts in (1, 2):
        found = []
        for way in ways(kernels[f"router_row_{parts}"]):
            wait, product = (next(i for i, line in enumerate(way) if what in line) for what in ("ACQBULK", "HMMA"))
            found.append(sum(bool(WIDE.search(line)) for line in way[wait:product]))
        assert sorted(found) == [4, parts * 4]  # the product's own are DEPTH chunks


def test_gate_up_has_room_beside_a_router(compiled: Compiled) -> None:
    """Of Flash on a rank of four: 10 warps of one and 7 of the other, from 64 K registers a multiprocessor."""
    used = {}
    for unit in ("route", "moe"):
        log = compiled(unit, "sm_90")[1]
        used |= dict(re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", log, re.DOTALL))
    each = {name: -(-int(count) // 8) * 8 * 32 for name, count in used.items()}
    assert 10 * each["router_row_2"] + 7 * each["experts_choose_gate_up_4"] <= 64 * 1024


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("quads", [1, 4])
def test_gate_up_that_selects_asks_for_the_logits_right_after_the_wait(
    quads: int, arch: str, tmp_path: Path, compiled: Compiled
) -> None:
    """The bias before it; all weights of a span follow the choice, which has no division but that of the scores."""
    code = disassembled(compiled("moe", arch)[0], tmp_path)[f"experts_choose_gate_up_{quads}"]
    wait = wait_in(code)
    loads = [i for i in range(wait, len(code)) if "LDG" in code[i]]
    assert sum("LDG" in line for line in code[:wait]) == quads
    assert loads[0] - wait < 60
    assert sum(".LTC128B" in code[i] for i in loads[: 2 * quads + 8 + 4]) == 8  # with the tokens


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("tokens", [8, 16])
def test_gate_up_asks_for_its_expert_right_after_the_wait(
    tokens: int, arch: str, tmp_path: Path, compiled: Compiled
) -> None:
    """Divisions stand before it; then come the expert's id and the plan's length, and all weights of a span."""
    code = disassembled(compiled("moe", arch)[0], tmp_path)[f"experts_gate_up_{tokens}"]
    wait = wait_in(code)
    loads = [i for i in range(wait, len(code)) if "LDG" in code[i]]
    assert "MUFU" in "".join(code[:wait])
    assert loads[0] - wait < 20
    assert sum(".LTC128B" in code[i] for i in loads[: 2 + 8 + tokens // 2]) == 8  # with the tokens


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("form", [f"experts_down_16_{slots}" for slots in DOWN_FORMS[1]])
def test_down_asks_for_an_expert_after_the_products_of_one(
    form: str, arch: str, tmp_path: Path, compiled: Compiled
) -> None:
    """Not after those of all that it had: of two tiles of tokens, two instructions each."""
    code = disassembled(compiled("moe", arch)[0], tmp_path)[form]
    steps = "".join(
        "P" if "HMMA" in line else "W" if ".LTC128B" in line else "" for line in code[wait_in(code) :]
    ).rstrip("P")
    assert steps == "PPPPWW" * int(form.rpartition("_")[2])


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_a_kda_window_is_one_trip_to_memory(arch: str, tmp_path: Path, compiled: Compiled) -> None:
    """State, taps and bias before the wait; then every row of the window before anything is made of one."""
    code = disassembled(compiled("kda", arch)[0], tmp_path)["kda_verify_sums"]
    wait = wait_in(code)
    first = next(i for i, line in enumerate(code) if i > wait and "MUFU" in line)
    early, rows = (sum("LDG" in line for line in part) for part in (code[:wait], code[wait:first]))
    assert sum(bool(WIDE.search(line)) for line in code[:wait]) == 7
    assert early == 7 + 3 + 3 + 1 + 1 + 1 + 2  # the history's, one value's taps, rate and norm, two words
    assert rows == 16 + 2 + 4 + 2 + 1  # q or k, decay, v, gate and beta, four channels for the history
    assert trips(code[wait:first]) == [rows]


def trips(code: list[str]) -> list[int]:
    """How many loads are sent before something awaits one of them, again and again."""
    counts, under_way = [0], set()
    for line in code:
        registers = re.findall(r"\bR\d+\b", line)
        if "LDG" in line:
            counts[-1] += 1
            under_way.add(registers[0])
        elif not under_way.isdisjoint(registers):
            counts.append(0)
            under_way.clear()
    return [count for count in counts if count]


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_120"])
def test_a_greedy_verdict_is_few_trips_to_memory(arch: str, tmp_path: Path, compiled: Compiled) -> None:
    """Of one row: value and id of a span, and a logit of the tail; of several: all spans, then the tail."""
    code = disassembled(compiled("sample", arch)[0], tmp_path)["sample_verdict_best"]
    wait = wait_in(code)
    assert sorted(trips(code[wait:])) in ([3, 16, 24], [3, 40])


@pytest.fixture(scope="module", params=["sm_90", "sm_100", "sm_120"])
def mla(request: pytest.FixtureRequest, compiled: Compiled, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Instructions of MLA's kernels."""
    return disassembled(compiled("mla", request.param)[0], tmp_path_factory.mktemp("mla"))


def test_a_merge_asks_for_all_splits_at_once(mla: dict[str, list[str]]) -> None:
    for name in ("mla_merge", "mla_merge_values"):
        code = mla[name]
        wait = wait_in(code)
        wide = [i for i, line in enumerate(code) if i > wait and WIDE.search(line)]
        first = next(i for i, line in enumerate(code) if "SHFL" in line)
        assert len(wide) == 9
        assert wide[-1] < first


def test_attention_of_one_tile_asks_for_all_queries_before_a_barrier(mla: dict[str, list[str]]) -> None:
    """Right after the wait: the keys are there already. And what it leaves is stored 16 bytes at a time."""
    for name in ("mla_attend_64_1", "mla_attend_128_1"):
        code = mla[name]
        wait = wait_in(code)
        barrier = next(i for i, line in enumerate(code) if i > wait and "BAR.SYNC" in line)
        queries = [i for i in range(wait, barrier) if re.search(r"LDG\.\S*128", code[i])]
        assert len(queries) == 36
        assert not any("HMMA" in line for line in code[:barrier])
        assert queries[-1] - wait < 80
        assert sum(bool(re.search(r"STG\.\S*128", line)) for line in code) == 4
