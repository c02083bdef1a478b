"""Checks of KDA, MLA, sampling and draft ops against the reference, for a GPU and for the emulated one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from device_checks import Place, assert_near
from ling_kernels.cuda.lazy import Candidates
from ling_kernels.ops import (
    MAX_STOP_IDS,
    ROW_TILE,
    DraftLayerParams,
    DraftParams,
    KdaParams,
    KdaStaged,
    Limits,
    MlaParams,
    MlpParams,
    Proposal,
    Sampling,
    Verdict,
)
from ling_kernels.reference import draft, kda, mla, sample
from parity import assert_bits

EPS = 1e-6


# ---- KDA ---------------------------------------------------------------------------------------------------------


@dataclass
class Kda:
    """One layer of a state of `layers`: params and what a window starts from."""

    params: KdaParams
    conv: Tensor
    state: Tensor
    proj: Tensor
    layer: int = 1

    def copy(self) -> Kda:
        return replace(self, conv=self.conv.clone(), state=self.state.clone())


def make_kda(place: Place, heads: int, rows: int, layers: int = 3, seed: int = 0) -> Kda:
    inner = heads * 128
    o_norm = 1 + place.rand(128, seed=seed + 1, scale=0.1)
    vectors = [place.rand(n, seed=seed + 2 + i, scale=0.5).float() for i, n in enumerate((heads, inner))]
    conv = place.rand(3 * inner, 4, seed=seed + 4, scale=0.5)
    place.constant(o_norm, conv, *vectors)
    params = KdaParams(conv, conv, *vectors, o_norm, conv, heads, -5.0, EPS)
    history = place.rand(layers, 3, 3 * inner, seed=seed + 5)
    state = place.rand(layers, heads, 128, 128, seed=seed + 6, scale=0.3).float()
    return Kda(params, history, state, place.rand(rows, 5 * inner + heads, seed=seed + 7))


def run_window(place: Place, at: Kda, proj: Tensor, rows: int) -> tuple[Tensor, list[KdaStaged]]:
    """Normed output of the layer's window, and all layers staged (the others from the same projection)."""
    staged, normed = [], None
    for layer in range(at.state.shape[0]):
        o, kept = place.ops.kda_verify(proj, at.conv[layer], at.state[layer], at.params, rows)
        staged.append(kept)
        if layer == at.layer:
            normed = finished(place, o, rows)
    return normed, staged


def finished(place: Place, o: Tensor, rows: int) -> Tensor:
    """A window's output with the norm that the projection after it would apply; fp32."""
    o, gated = o[:rows].float(), place.ops.gated
    place.ops.gated = None
    if gated is None:
        return o
    by_head = o.view(rows, gated.sums.shape[1], 128)
    scale = torch.rsqrt(gated.sums[:rows].sum(-1, keepdim=True) / 128 + gated.eps)
    return (by_head * scale).flatten(1)


def tile(proj: Tensor) -> Tensor:
    """The rows of a window in a buffer of ROW_TILE, the rest NaN."""
    padded = proj.new_full((ROW_TILE, proj.shape[1]), torch.nan)
    padded[: proj.shape[0]] = proj
    return padded


def check_kda_window(place: Place, heads: int, rows: int) -> None:
    at = make_kda(place, heads, rows)
    o, staged = run_window(place, at, tile(at.proj), rows)
    padded = torch.cat([at.proj, at.proj.new_zeros(ROW_TILE - rows, at.proj.shape[1])])
    want, _ = kda.verify(padded, at.conv[1], at.state[1], at.params, rows)
    assert_near(o, want[:rows].float(), f"KDA of {rows} rows")
    for count in {0, 1, rows}:
        got, expected = at.copy(), at.copy()
        place.ops.kda_commit(staged, got.conv, got.state, torch.tensor(count, device=place.device))
        for layer in range(at.state.shape[0]):
            _, kept = kda.verify(padded, at.conv[layer], at.state[layer], at.params, rows)
            one = expected.conv[layer : layer + 1], expected.state[layer : layer + 1]
            kda.commit([kept], *one, torch.tensor(count, device=place.device))
        assert_near(got.state.flatten(1), expected.state.flatten(1), f"state after {count}", 1e-5)
        assert_bits(got.conv, expected.conv, f"conv history after {count}")


def check_kda_keeps_one_row(place: Place, heads: int) -> None:
    """A step's only row is kept by kda_verify and `advance`, or not at all, as kda_commit would do it afterwards."""
    start = make_kda(place, heads, 1, layers=2, seed=30)
    row = tile(start.proj)

    def step(limits: Limits | None, count: int) -> Kda:
        at, kept = start.copy(), torch.tensor(count, device=place.device)
        staged = []
        for layer in range(2):
            _, window = place.ops.kda_verify(row, at.conv[layer], at.state[layer], at.params, 1, limits=limits)
            place.ops.gated = None
            staged.append(window)
        place.ops.kda_commit(staged, at.conv, at.state, kept, lazy=limits is not None)
        if limits is not None:
            entry = torch.arange(22, device=place.device)
            verdict = Verdict(entry[:1], kept, entry[5], torch.tensor(False, device=place.device), entry)
            ring = torch.ones(8, 38, dtype=torch.int64, device=place.device)
            positions = torch.arange(ROW_TILE, device=place.device)
            place.ops.advance(verdict, ring, positions, entry[3].clone(), limits)
            assert (int(positions[0]), int(limits.step)) == (count, 42)
        return at

    ended = [make_limits(place, done=True), make_limits(place, remaining=0)]
    for count, limits in [(1, make_limits(place)), *((0, limits) for limits in ended)]:
        got, want = step(limits, count), step(None, count)
        assert_bits(got.state, want.state, f"states of {count} rows")
        assert_bits(got.conv, want.conv, f"conv history of {count} rows")


def check_kda_bits(place: Place, heads: int, widths: tuple[int, ...], length: int = 16) -> None:
    """Windows of any width, and a prefill, leave the bits of single rows."""
    start = make_kda(place, heads, length, layers=2, seed=20)

    def walk(width: int) -> tuple[Tensor, Kda]:
        at, outputs = start.copy(), []
        for first in range(0, length, width):
            part = start.proj[first : first + width]
            o, staged = run_window(place, at, tile(part), part.shape[0])
            place.ops.kda_commit(staged, at.conv, at.state, torch.tensor(part.shape[0], device=place.device))
            outputs.append(o)
        return torch.cat(outputs), at

    alone, after = walk(1)
    for width in widths:
        o, at = walk(width)
        assert_bits(o, alone, f"KDA output at width {width}")
        assert_bits(at.state, after.state, f"state at width {width}")
        assert_bits(at.conv, after.conv, f"conv history at width {width}")
    at = start.copy()
    for layer in range(2):
        o = place.ops.kda_prefill(start.proj, at.conv[layer], at.state[layer], start.params)
    assert_bits(at.state, after.state, "state after prefill")
    assert_bits(at.conv, after.conv, "conv history after prefill")
    assert_near(o.float(), alone, "prefill output")


def check_kda_prefill(place: Place, heads: int, rows: int) -> None:
    at = make_kda(place, heads, rows, seed=40)
    want = at.copy()
    o = place.ops.kda_prefill(at.proj, at.conv[1], at.state[1], at.params)
    expected = kda.prefill(at.proj, want.conv[1], want.state[1], at.params)
    assert_near(o.float(), expected.float(), f"prefill of {rows}")
    assert_near(at.state.flatten(1), want.state.flatten(1), "state after prefill", 1e-4)
    assert_bits(at.conv, want.conv, "conv history after prefill")


# ---- MLA ---------------------------------------------------------------------------------------------------------


def make_mla(place: Place, heads: int, rank: int = 0) -> MlaParams:
    """Params without the projections around it. rank: of the low-rank query, 0 for none."""
    up = place.weight(heads, 256, 512, seed=60)
    norm = 1 + place.rand(512, seed=61, scale=0.1)
    place.constant(norm)
    q_norm = q_b = None
    if rank:
        q_norm, q_b = 1 + place.rand(rank, seed=62, scale=0.1), place.weight(heads * 192, rank, seed=63)
        place.constant(q_norm)
    return MlaParams(up, q_norm, q_b, norm, up[:, :128], up[:, 128:], up, heads, 64, EPS)


def check_mla(place: Place, heads: int, rank: int, length: int, rows: int) -> None:
    """A window of `rows` after `length` cached rows; the cache gets exactly the window's rows."""
    params = make_mla(place, heads, rank)
    capacity = -(-(length + ROW_TILE) // 128) * 128
    cache = place.rand(capacity, 576, seed=64)
    table = mla.rope_table(capacity, 64, 6e6, place.device)
    proj = place.rand(rows, (rank or heads * 192) + 512 + 64 + heads, seed=65)
    positions = length + torch.arange(ROW_TILE, device=place.device)
    place.constant(table)
    got_cache, want_cache = cache.clone(), cache.clone()
    got = place.ops.mla(tile(proj), got_cache, table, positions, params, rows, capacity)
    want = mla.mla(proj, want_cache, table, positions[:rows], params, rows, capacity)
    assert_near(got[:rows].float(), want.float(), f"MLA, {heads} heads, {rows} rows after {length}")
    assert_near(got_cache.float(), want_cache.float(), "cache rows")
    untouched = torch.ones(capacity, dtype=torch.bool, device=place.device)
    untouched[length : length + rows] = False
    assert_bits(got_cache[untouched], cache[untouched], "other cache rows")


def check_mla_bits(place: Place, heads: int, length: int, widths: tuple[int, ...], rank: int = 0) -> None:
    """A row's bits do not depend on the window, nor on what lies past it."""
    params, capacity, total = make_mla(place, heads, rank), -(-(length + 2 * ROW_TILE) // 128) * 128, max(8, *widths)
    table = mla.rope_table(capacity, 64, 6e6, place.device)
    place.constant(table)
    proj = place.rand(total, (rank or heads * 192) + 576 + heads, seed=66)

    def walk(width: int, seed: int) -> Tensor:
        cache, outputs = place.rand(capacity, 576, seed=67), []
        cache[length:] = place.rand(capacity - length, 576, seed=seed)
        for first in range(0, total, width):
            part = proj[first : first + width]
            positions = length + first + torch.arange(ROW_TILE, device=place.device)
            o = place.ops.mla(tile(part), cache, table, positions, params, part.shape[0], capacity)
            outputs.append(o[: part.shape[0]].clone())
        return torch.cat(outputs)

    alone = walk(1, 68)
    for width in widths:
        assert_bits(walk(width, 69 + width), alone, f"MLA at width {width}")


# ---- sampling ----------------------------------------------------------------------------------------------------


def make_sampling(place: Place, vocab: int, temperature: float, top_k: int, top_p: float, seed: int = 7) -> Sampling:
    def word(value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor(value, dtype=dtype, device=place.device)

    whole, real = torch.int64, torch.float32
    return Sampling(
        temperature == 0, word(temperature, real), word(top_k, whole), word(top_p, real), word(seed, whole), vocab
    )


def make_limits(place: Place, remaining: int = 100, stop: tuple[int, ...] = (), done: bool = False) -> Limits:
    ids = torch.tensor(list(stop) + [-1] * (MAX_STOP_IDS - len(stop)), device=place.device)
    return Limits(
        torch.tensor(remaining, device=place.device),
        ids,
        torch.tensor(done, device=place.device),
        torch.tensor(41, device=place.device),
    )


def heads_best(logits: Tensor, span: int) -> Candidates:
    """What the head says of its logits [ROW_TILE, n] beside them."""
    parts = torch.nn.functional.pad(logits, (0, -logits.shape[1] % span), value=-torch.inf)
    parts = parts.view(ROW_TILE, -1, span)
    values, place = parts.nan_to_num(-torch.inf, -torch.inf, -torch.inf).max(-1)
    ids = place + span * torch.arange(parts.shape[1], device=logits.device)
    broken = torch.nn.functional.pad(~logits.isfinite(), (0, -logits.shape[1] % span)).view(parts.shape).any(-1)
    values = values.masked_fill(broken, torch.nan)
    return Candidates(logits, values.T.contiguous(), ids.T.int().contiguous(), span)


def check_verdict(
    place: Place,
    vocab: int,
    padded: int,
    sampling: Sampling,
    rows: int,
    thorough: bool = True,
    span: int = 0,
    scale: float = 4.0,
) -> None:
    """Tokens, count, ring entry: with drafts that agree for a while, stops, a limit, NaN and done. span: the head's
    best of so many ids each are known, 0 where they are not."""
    generator = torch.Generator().manual_seed(70)
    logits = (scale * torch.randn(ROW_TILE, padded, generator=generator)).to(place.device)
    logits[:, 5:9] = logits[:, 4:5]  # ties
    logits[0, vocab:] = 1e9  # padding is never chosen
    positions = torch.arange(ROW_TILE, device=place.device) * 3 + 11
    tokens = sample.choose(logits[:rows, :vocab], positions[:rows], sampling)
    drafts = tokens[:-1].clone() if rows > 1 else None
    cases = [(drafts, make_limits(place)), (drafts, make_limits(place, remaining=2))]
    cases += [(drafts, make_limits(place, done=True)), (drafts, make_limits(place, stop=(int(tokens[rows // 2]),)))]
    if rows > 2:
        wrong = drafts.clone()
        wrong[rows // 2] += 1
        cases.append((wrong, make_limits(place)))
    for drafted, limits in cases if thorough else cases[-1:]:
        _compare_verdicts(place, logits, drafted, positions, sampling, limits, rows, span)
    for value in (torch.nan, torch.inf) if thorough else ():
        broken = logits.clone()
        broken[rows - 1, vocab // 2] = value
        place.ops.candidates = heads_best(broken, span) if span else None
        got = place.ops.verdict(broken, drafts, positions, sampling, make_limits(place), rows)
        want = sample.verdict(broken, drafts, positions, sampling, make_limits(place), rows)
        assert got.count == want.count == 0
        assert got.entry[5] == want.entry[5] == 1
        assert 0 <= got.tokens.min() <= got.tokens.max() < vocab
        broken = logits.clone()
        broken[:, vocab - 1 if vocab % 2 else 0] = value  # in the tail, or in the first span
        place.ops.candidates = heads_best(broken, span) if span else None
        got = place.ops.verdict(broken, drafts, positions, sampling, make_limits(place), rows)
        assert (got.count, got.entry[5]) == (0, 1)
    place.ops.candidates = None


def _compare_verdicts(
    place: Place,
    logits: Tensor,
    drafts: Tensor | None,
    positions: Tensor,
    sampling: Sampling,
    limits: Limits,
    rows: int,
    span: int,
) -> None:
    place.ops.candidates = heads_best(logits, span) if span else None
    got = place.ops.verdict(logits, drafts, positions, sampling, limits, rows)
    want = sample.verdict(logits, drafts, positions, sampling, limits, rows)
    for name in ("tokens", "count", "anchor", "done", "entry"):
        assert torch.equal(getattr(got, name), getattr(want, name)), f"{name}: {got} != {want}"


def check_advance(place: Place) -> None:
    """Eight steps and more: words and ring as the reference leaves them, also where drafts are proposed."""
    start = [7 + torch.arange(ROW_TILE, device=place.device), torch.tensor(3, device=place.device)]
    rings, words, limits, drafts = [], [], [], []
    for _ in range(2):
        drafts.append(torch.zeros(ROW_TILE - 1, dtype=torch.int64, device=place.device))
        rings.append(torch.ones(8, 38, dtype=torch.int64, device=place.device))
        words.append([word.clone() for word in start])
        limits.append(make_limits(place))
    for number in range(10):
        count = torch.tensor(number % 3, device=place.device)
        entry = torch.arange(22, device=place.device) * (number + 1)
        ended = torch.tensor(number == 9, device=place.device)
        verdict = Verdict(entry[:2], count, start[1] + number, ended, entry)
        place.ops.advance(verdict, rings[0], *words[0], limits[0])
        sample.advance(verdict, rings[1], *words[1], limits[1])
        if number % 4:
            proposal = Proposal(entry[: number + 2] + 5, torch.rand(number + 2).to(place.device))
            place.ops.expect(proposal, drafts[0], rings[0], limits[0].step)
            sample.expect(proposal, drafts[1], rings[1], limits[1].step)
    kept = [(ring, draft, *word, *limit) for ring, draft, word, limit in zip(rings, drafts, words, limits, strict=True)]
    for got, want in zip(*kept, strict=True):
        assert torch.equal(got, want)


def check_pick(place: Place, vocab: int, sampling: Sampling) -> None:
    logits = 3 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(71)).to(place.device)
    positions = torch.tensor([5, 9], device=place.device)
    got, want = place.ops.pick(logits, positions, sampling), sample.pick(logits, positions, sampling)
    assert torch.equal(got.drafts, want.drafts)
    assert_near(got.confidence[None], want.confidence[None], "confidence", 1e-4)


# ---- draft -------------------------------------------------------------------------------------------------------


def make_draft(
    place: Place, width: int, heads: int, kv_heads: int, rank: int, vocab: int, head: str, neox: bool, rope_dim: int
) -> DraftParams:
    def norm(size: int, seed: int) -> Tensor:
        made = 1 + place.rand(size, seed=seed, scale=0.1)
        place.constant(made)
        return made

    def layer(seed: int) -> DraftLayerParams:
        return DraftLayerParams(
            norm(width, seed),
            place.weight((heads + 2 * kv_heads) * 128, width, seed=seed + 1),
            norm(128, seed + 2),
            norm(128, seed + 3),
            place.weight(width, heads * 128, seed=seed + 4),
            norm(width, seed + 5),
            MlpParams(place.weight(2 * 64, width, seed=seed + 6), place.weight(width, 64, seed=seed + 7)),
        )

    w2 = place.weight(vocab, rank, seed=84) * 8  # a bias that changes which token wins
    place.constant(w2)
    shapes = {
        "vanilla": (),
        "gated": ((rank, width + rank), (rank,)),
        "rnn": ((3 * rank, 2 * rank + width), (3 * rank,)),
    }
    return DraftParams(
        fc=place.weight(width, 2 * width, seed=80),
        hidden_norm=norm(width, 81),
        layers=(layer(90), layer(100)),
        norm=norm(width, 82),
        markov_w1=place.weight(vocab, rank, seed=83),
        markov_w2=w2,
        markov_head=head,
        markov_extra=tuple(place.weight(*shape, seed=85 + i) for i, shape in enumerate(shapes[head])),
        confidence=place.weight(1, width + rank, seed=87),
        confidence_bias=place.weight(1, seed=88),
        confidence_with_markov=True,
        temperatures=torch.linspace(0.5, 2.0, 8, device=place.device),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rope_dim=rope_dim,
        neox=neox,
        from_anchor=True,
        block_size=8,
        mask_id=0,
        eps=EPS,
    )


def check_draft_embed(place: Place, width: int) -> None:
    table = place.weight(50, width, seed=115)
    anchor, length = torch.tensor(7, device=place.device), torch.tensor(30, device=place.device)
    got = place.ops.draft_embed(anchor, length, table, 3, 9)
    want = draft.embed(anchor, length, table, 3, 9)
    assert_bits(got[0], want[0], "embeddings of a block")
    assert torch.equal(got[1], want[1])


def check_draft(place: Place, params: DraftParams, length: int, rows: int, block: int) -> None:
    """Context rows of a window, then a block over them."""
    width, capacity = params.fc.shape[0], -(-(length + 2 * ROW_TILE) // 128) * 128
    table = mla.rope_table(capacity, params.rope_dim, 1e4, place.device)
    place.constant(table)
    shape = (len(params.layers), 2, capacity, params.num_kv_heads, 128)
    got_cache = place.rand(*shape, seed=110)
    want_cache = got_cache.clone()
    taps = place.rand(ROW_TILE, params.fc.shape[1], seed=111)
    positions = length - rows + torch.arange(ROW_TILE, device=place.device)
    place.ops.draft_context(taps, params, got_cache, table, positions, rows)
    draft.context(taps, params, want_cache, table, positions, rows)
    assert_near(got_cache.float().flatten(3), want_cache.float().flatten(3), "draft context")
    x = place.rand(block, width, seed=112)
    at = torch.tensor(length, device=place.device)
    extent = -(-length // 128) * 128
    h = place.ops.draft_block(x, params, got_cache, table, at, extent)
    want = draft.block(x, params, want_cache, table, at, extent)
    assert_near(h.float(), want.float(), f"draft block after {length}", 2e-2)  # bf16 between its layers, twice over
    kept = got_cache[:, :, :length].float().flatten(3)
    assert_near(kept, want_cache[:, :, :length].float().flatten(3), "context after a block")


def check_markov(place: Place, params: DraftParams, sampling: Sampling, picks: int) -> None:
    width, vocab = params.fc.shape[0], params.markov_w1.shape[0]
    generator = torch.Generator().manual_seed(113)
    base = torch.randn(picks, vocab, generator=generator).to(place.device)
    h = place.rand(picks, width, seed=114)
    positions = torch.arange(picks, device=place.device) + 30
    anchor = torch.tensor(3, device=place.device)
    got = place.ops.markov_pick(base, h, anchor, params, positions, sampling)
    want = draft.pick(base, h, anchor, params, positions, sampling)
    assert torch.equal(got.drafts, want.drafts)
    assert_near(got.confidence[None], want.confidence[None], "confidence", 1e-3)
