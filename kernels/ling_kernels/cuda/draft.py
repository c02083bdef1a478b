"""DSpark on a GPU: context injection, block draft, Markov picks and confidence (draft.cuh, draft_attend.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Int64
from ling_kernels.cuda.sample import BLOCKS
from ling_kernels.ops import DRAFT_BEST, ROW_TILE, DraftLayerParams, DraftParams, KernelError, Proposal, Sampling

HEAD, TILE = 128, 16
WARPS, KEYS, STAGES, SPLITS = 4, 16, 2, 64  # as in draft_attend.cuh
MERGE_THREADS, MARKOV_THREADS = 128, 256
LOG2_E = 1.4426950408889634
# (lanes to a row of W2, pieces of 8 a lane): for ranks up to 8 * lanes * pieces
PICKS = ((8, 1), (16, 1), (32, 1), (32, 2), (32, 4))
BLOCKS_PER_SM = 2


def draft_bytes() -> int:
    """sizeof(DraftShared) in draft_attend.cuh."""
    stage = 2 * KEYS * (HEAD + 8) * 2
    return (WARPS * STAGES + 1) * stage + TILE * (HEAD + 8) * 2 + ROW_TILE * HEAD * 4 + 2 * WARPS * TILE * 4


class DraftOps:
    """Contracts in `ling_kernels.ops.Ops`. turns: every other Markov pick walks W2 from its end, where the one before
    left off; asked: steps of that walk that a pick asks for while the token before it is not known yet."""

    turns = True
    asked = 2

    def draft_embed(self, anchor: Tensor, length: Tensor, table: Tensor, mask: int, num: int) -> tuple[Tensor, Tensor]:
        width = table.shape[1]
        if width % 8:
            raise KernelError(f"hidden size {width}: the kernels need a multiple of 8")
        x = table.new_empty(num, width)
        positions = torch.empty(num, dtype=torch.int64, device=table.device)
        threads = min(256, -(-width // 256) * 32)
        self.device.launch("draft_embed", num, threads, [anchor, length, table, Int64(mask), width, x, positions])
        return x, positions

    def draft_context(
        self, taps: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, positions: Tensor, rows: int
    ) -> None:
        _check(params)
        live = rows if rows <= ROW_TILE else None  # more of them: a prefill chunk
        norms, weights = self._key_norms(params), [layer.in_proj[params.num_heads * HEAD :] for layer in params.layers]
        context = self.linear(taps, params.fc, live)
        _, context = self.exchange_norm(None, context, params.hidden_norm, params.eps, live)
        if live is None:
            for index, weight in enumerate(weights):
                proj = self.linear(context, weight)
                self._heads(proj[None], norms[index:], params, cache[index:], rope, positions, rows)
            return
        proj = taps.new_empty(len(weights), taps.shape[0], 2 * params.num_kv_heads * HEAD)
        for index, weight in enumerate(weights):
            self.linear(context, weight, live, out=proj[index])
        self._heads(proj, norms, params, cache, rope, positions, rows)

    def _heads(
        self,
        proj: Tensor,
        norms: Tensor,
        params: DraftParams,
        cache: Tensor,
        rope: Tensor,
        positions: Tensor,
        rows: int,
    ) -> None:
        """Keys and values of proj [layers, R, k‖v] into rows `positions[:rows]` of cache [layers, 2, C, Hkv, head]."""
        kv, layers = params.num_kv_heads, proj.shape[0]
        args = [proj, proj.shape[1], norms, rope, params.rope_dim, int(params.neox), positions, cache]
        args += [cache.shape[2], kv, float(params.eps)]
        self.device.launch("draft_heads", (2 * kv, rows, layers), 32, args)

    def _key_norms(self, params: DraftParams) -> Tensor:
        """All layers' key norms [layers, head], side by side at first use."""
        kept: dict[int, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_norms", {})
        first = params.layers[0].k_norm
        if first.data_ptr() not in kept:
            # with the original, so that its address is not given to another
            kept[first.data_ptr()] = (first, torch.stack([layer.k_norm for layer in params.layers]))
        return kept[first.data_ptr()][1]

    def draft_block(
        self, x: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, length: Tensor, extent: int
    ) -> Tensor:
        _check(params)
        num, partial = x.shape[0], None
        if num > ROW_TILE:
            raise KernelError(f"a draft block of {num} rows: at most {ROW_TILE} are supported")
        for index, layer in enumerate(params.layers):
            x, h = self.exchange_norm(partial, x, layer.attention_norm, params.eps, num)
            proj = self.linear(h, layer.in_proj, num)
            mixed = self._draft_attend(proj, layer, params, cache[index], rope, length)
            partial = self.linear_partial(mixed, layer.out_proj, num)
            x, h = self.exchange_norm(partial, x, layer.mlp_norm, params.eps, num)
            partial = self.mlp(h, layer.mlp, num)
        return self.exchange_norm(partial, x, params.norm, params.eps, num)[1]

    def _draft_attend(
        self, proj: Tensor, layer: DraftLayerParams, params: DraftParams, cache: Tensor, rope: Tensor, length: Tensor
    ) -> Tensor:
        """Attention of rows proj [n, q‖k‖v] over the context in cache [2, C, Hkv, head] and over each other. The cache
        is not written: a block's rows are nobody else's."""
        num, heads, kv = proj.shape[0], params.num_heads, params.num_kv_heads
        columns, shared = kv * -(-num * heads // kv // TILE), draft_bytes()
        slots = self.device.resident("draft_attend", WARPS * 32, shared)
        splits = min(SPLITS, max(1, slots // columns))
        sums = torch.empty(splits, heads * num, HEAD, dtype=torch.float32, device=proj.device)
        stats = torch.empty(splits, heads * num, 2, dtype=torch.float32, device=proj.device)
        args = [sums, stats, proj, cache[0], cache[1], length, layer.q_norm, layer.k_norm, rope, params.rope_dim]
        args += [int(params.neox), heads, kv, num, cache.shape[1], float(params.eps), HEAD**-0.5 * LOG2_E]
        self.device.launch("draft_attend", (columns, splits), WARPS * 32, args, shared)
        mixed = proj.new_empty(num, heads * HEAD)
        self.device.launch("draft_merge", (heads, num), MERGE_THREADS, [mixed, sums, stats, length, splits])
        return mixed

    def markov_pick(
        self, base: Tensor, h: Tensor, anchor: Tensor, params: DraftParams, positions: Tensor, sampling: Sampling
    ) -> Proposal:
        num, rank, where = base.shape[0], params.markov_w1.shape[1], base.device
        vocab = self.local_vocab(sampling, base.shape[1])
        name = _pick_name(rank)
        grid = BLOCKS_PER_SM * self.device.properties.num_sms
        blocks = grid if sampling.greedy else BLOCKS
        drawn = torch.empty(num, blocks, dtype=torch.int64, device=where)
        logits = None if sampling.greedy else torch.empty(1, base.shape[1], dtype=torch.float32, device=where)
        confidence = torch.empty(num, dtype=torch.float32, device=where)
        inputs = None if params.markov_head == "vanilla" else torch.empty(3, rank, dtype=torch.float32, device=where)
        for row in range(num):
            bias = None
            if inputs is not None:
                bias = inputs[2]
                self._markov_input(inputs, h[row], anchor, drawn, params, row)
            args = [params.markov_w1, params.markov_w2, bias, base[row], logits, drawn]
            args += [drawn[row] if sampling.greedy else None, anchor, h[row], params.confidence, params.confidence_bias]
            args += [params.temperatures[row:], confidence[row:], blocks, row, vocab, rank, h.shape[1]]
            args += [int(params.confidence_with_markov), row % 2 if self.turns else 0, self.asked]
            self.device.launch(name, grid + 1, MARKOV_THREADS, args)
            if logits is None:
                self.settle_pick(drawn[row], base.shape[1])
            else:
                self.draw(logits, positions[row:], sampling, 1, drawn=drawn[row], most=DRAFT_BEST)
        tokens = torch.empty(num, dtype=torch.int64, device=where)
        self.device.launch("markov_tokens", num, 32, [drawn, blocks, tokens])
        return Proposal(tokens, confidence)

    def local_vocab(self, sampling: Sampling, count: int) -> int:
        """Ids that may be chosen among the `count` rows of the vocabulary that this GPU holds."""
        return sampling.vocab

    def settle_pick(self, drawn: Tensor, count: int) -> None:
        """After a greedy pick over `count` rows of the vocabulary: its candidates, in place, to those of all ranks."""

    def _markov_input(
        self, inputs: Tensor, hidden: Tensor, anchor: Tensor, drawn: Tensor, params: DraftParams, row: int
    ) -> None:
        """The gated or recurrent head's input to W2 in inputs[2]; its state alternates between the first two rows."""
        weight, bias = params.markov_extra
        rank, gates = inputs.shape[1], 1 if params.markov_head == "gated" else 3
        args = [weight, bias, params.markov_w1, hidden, inputs[row % 2], inputs[1 - row % 2], inputs[2], anchor, drawn]
        args += [drawn.shape[1], row, rank, hidden.shape[0], gates]
        self.device.launch("markov_input", -(-rank // 8), MARKOV_THREADS, args)


def _check(params: DraftParams) -> None:
    if params.head_dim != HEAD:
        raise KernelError(f"draft heads of {params.head_dim}: the kernels support {HEAD}")
    if params.num_heads % params.num_kv_heads:
        raise KernelError(f"{params.num_heads} draft heads do not share {params.num_kv_heads} key heads evenly")
    if params.rope_dim % 8 or params.rope_dim > HEAD:
        raise KernelError(f"draft rope of {params.rope_dim}: the kernels need a multiple of 8 up to {HEAD}")


def _pick_name(rank: int) -> str:
    for lanes, pieces in PICKS:
        if rank <= 8 * lanes * pieces and rank % 8 == 0:
            return f"markov_pick_{lanes}_{pieces}"
    raise KernelError(f"Markov rank {rank}: the kernels support multiples of 8 up to {8 * 32 * 4}")
