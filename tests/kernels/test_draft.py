"""The draft ops against dspark.md sections 3 to 6, written out plainly in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels.ops import DraftLayerParams, DraftParams, MlpParams, Sampling
from ling_kernels.reference import draft
from ling_kernels.reference.mla import rope_table

WIDTH, HEADS, KV_HEADS, HEAD, RANK, VOCAB, BLOCK, TAPS = 24, 4, 2, 8, 6, 30, 5, 3
CONTEXT = 40


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_params(
    head: str = "vanilla", neox: bool = True, rope_dim: int = HEAD, with_markov: bool = True
) -> DraftParams:
    def layer(seed: int) -> DraftLayerParams:
        return DraftLayerParams(
            1 + 0.1 * rand(WIDTH, seed=seed),
            rand((HEADS + 2 * KV_HEADS) * HEAD, WIDTH, seed=seed + 1) / 4,
            1 + 0.1 * rand(HEAD, seed=seed + 2),
            1 + 0.1 * rand(HEAD, seed=seed + 3),
            rand(WIDTH, HEADS * HEAD, seed=seed + 4) / 5,
            1 + 0.1 * rand(WIDTH, seed=seed + 5),
            MlpParams(rand(2 * 20, WIDTH, seed=seed + 6) / 4, rand(WIDTH, 20, seed=seed + 7) / 4),
        )

    extra = {
        "vanilla": (),
        "gated": (rand(RANK, WIDTH + RANK, seed=50) / 3, rand(RANK, seed=51)),
        "rnn": (rand(3 * RANK, 2 * RANK + WIDTH, seed=52) / 3, rand(3 * RANK, seed=53)),
    }[head]
    return DraftParams(
        fc=rand(WIDTH, TAPS * WIDTH, seed=1) / 8,
        hidden_norm=1 + 0.1 * rand(WIDTH, seed=2),
        layers=(layer(10), layer(20)),
        norm=1 + 0.1 * rand(WIDTH, seed=3),
        markov_w1=rand(VOCAB, RANK, seed=4),
        markov_w2=rand(VOCAB, RANK, seed=5),
        markov_head=head,
        markov_extra=extra,
        confidence=rand(1, WIDTH + (RANK if with_markov else 0), seed=6) / 4,
        confidence_bias=rand(1, seed=7),
        confidence_with_markov=with_markov,
        temperatures=torch.linspace(0.5, 2.0, BLOCK),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD,
        rope_dim=rope_dim,
        neox=neox,
        from_anchor=True,
        block_size=BLOCK,
        mask_id=0,
        eps=1e-6,
    )


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


def turn(x: Tensor, position: int, p: DraftParams, theta: float) -> Tensor:
    """Rope of one head's vector [HEAD] at a position."""
    out, half = x.clone(), p.rope_dim // 2
    for i in range(half):
        angle = torch.tensor(position * theta ** (-2 * i / p.rope_dim), dtype=torch.float64)
        a, b = (i, i + half) if p.neox else (2 * i, 2 * i + 1)
        out[a], out[b] = x[a] * angle.cos() - x[b] * angle.sin(), x[b] * angle.cos() + x[a] * angle.sin()
    return out


def plainly(p: DraftParams, taps: Tensor, x: Tensor, theta: float) -> Tensor:
    """Final hidden rows of a block after a context of taps [s, TAPS * WIDTH]; x [n, WIDTH] embeddings."""
    length, num = taps.shape[0], x.shape[0]
    ctx = rms(taps.double() @ p.fc.double().t(), p.hidden_norm)
    x = x.double()
    for layer in p.layers:
        weight = layer.in_proj.double().split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD])
        a = rms(x, layer.attention_norm)
        rows = torch.cat([ctx, a])  # context has no input norm and no query
        keys = rms((rows @ weight[1].t()).view(-1, KV_HEADS, HEAD), layer.k_norm)
        values = (rows @ weight[2].t()).view(-1, KV_HEADS, HEAD)
        queries = rms((a @ weight[0].t()).view(num, HEADS, HEAD), layer.q_norm)
        out = torch.zeros(num, HEADS, HEAD, dtype=torch.float64)
        for row in range(num):
            for h in range(HEADS):
                kv = h // (HEADS // KV_HEADS)
                q = turn(queries[row, h], length + row, p, theta)
                turned = torch.stack([turn(keys[j, kv], j, p, theta) for j in range(length + num)])
                weights = (turned @ q / HEAD**0.5).softmax(0)  # every row sees the whole block
                out[row, h] = weights @ values[:, kv]
        x = x + out.flatten(1) @ layer.out_proj.double().t()
        y = rms(x, layer.mlp_norm)
        gate, up = (y @ layer.mlp.gate_up.double().t()).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ layer.mlp.down.double().t()
    return rms(x, p.norm)


@pytest.mark.parametrize(("neox", "rope_dim"), [(True, HEAD), (False, HEAD), (True, 4)])
@pytest.mark.parametrize("length", [0, 1, 9])
def test_a_block_is_what_the_formulas_say(neox: bool, rope_dim: int, length: int) -> None:
    p = make_params(neox=neox, rope_dim=rope_dim)
    taps, x = rand(length, TAPS * WIDTH, seed=31), rand(BLOCK, WIDTH, seed=32)
    table = rope_table(CONTEXT, rope_dim, 1e4)
    cache = rand(2, 2, CONTEXT, KV_HEADS, HEAD, seed=33)  # what lies past the context must not be seen
    if length:
        padded = F.pad(taps, (0, 0, 0, 16 - length)) if length < 16 else taps
        draft.context(padded, p, cache, table, torch.arange(padded.shape[0]), length)
    h = draft.block(x, p, cache, table, torch.tensor(length), CONTEXT)
    want = plainly(p, taps, x, 1e4)
    assert h.isfinite().all()
    assert ((h.double() - want).norm() / want.norm()).item() < 1e-5


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_picks_go_left_to_right_with_a_bias_from_the_token_before(head: str) -> None:
    p = make_params(head)
    base, h, anchor = rand(BLOCK, VOCAB, seed=40), rand(BLOCK, WIDTH, seed=41), torch.tensor(7)
    sampling = Sampling(True, torch.tensor(0.0), torch.tensor(0), torch.tensor(1.0), torch.tensor(0), VOCAB - 2)
    base[:, VOCAB - 2 :] = 99.0  # padding of the vocabulary
    got = draft.pick(base, h, anchor, p, torch.arange(BLOCK), sampling)

    before, state = 7, torch.zeros(RANK, dtype=torch.float64)
    for row in range(BLOCK):
        known, hidden = p.markov_w1[before].double(), h[row].double()
        bias = known
        if head == "gated":
            weight, offset = (t.double() for t in p.markov_extra)
            bias = torch.sigmoid(weight @ torch.cat([hidden, known]) + offset) * known
        if head == "rnn":
            weight, offset = (t.double() for t in p.markov_extra)
            g, c, o = (weight @ torch.cat([state, known, hidden]) + offset).chunk(3)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            bias = torch.tanh(o)
        logits = base[row].double() + p.markov_w2.double() @ bias
        score = p.confidence.double()[0] @ torch.cat([hidden, known]) + p.confidence_bias.double()
        sure = torch.sigmoid(score / p.temperatures[row].double())
        before = int(logits[: VOCAB - 2].argmax())
        assert int(got.drafts[row]) == before
        assert float(got.confidence[row]) == pytest.approx(float(sure), abs=1e-6)


def test_confidence_may_come_without_the_markov_part_or_not_at_all() -> None:
    p = make_params(with_markov=False)
    base, h, anchor = rand(BLOCK, VOCAB, seed=40), rand(BLOCK, WIDTH, seed=41), torch.tensor(7)
    sampling = Sampling(True, torch.tensor(0.0), torch.tensor(0), torch.tensor(1.0), torch.tensor(0), VOCAB)
    got = draft.pick(base, h, anchor, p, torch.arange(BLOCK), sampling).confidence
    want = torch.sigmoid((h @ p.confidence[0] + p.confidence_bias) / p.temperatures)
    assert torch.allclose(got, want, atol=1e-6)
    bare = dataclasses.replace(p, confidence=None)
    assert draft.pick(base, h, anchor, bare, torch.arange(BLOCK), sampling).confidence.tolist() == [1.0] * BLOCK


def test_context_rows_do_not_depend_on_their_neighbours() -> None:
    p, table = make_params(), rope_table(CONTEXT, HEAD, 1e4)
    taps = rand(16, TAPS * WIDTH, seed=60)
    whole = torch.zeros(2, 2, CONTEXT, KV_HEADS, HEAD)
    draft.context(taps, p, whole, table, torch.arange(16), 16)
    for width in (1, 3, 9):
        parts = torch.zeros_like(whole)
        for start in range(0, 16, width):
            rows = min(width, 16 - start)
            tile = torch.roll(taps, -start, 0).clone()
            tile[rows:] = rand(16 - rows, TAPS * WIDTH, seed=61)
            draft.context(tile, p, parts, table, start + torch.arange(16), rows)
        assert parts.equal(whole), f"width {width}"
