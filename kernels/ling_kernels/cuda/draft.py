"""DSpark on a GPU: context injection, block draft, Markov picks and confidence (draft.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.cuda.latent import MERGE_GROUPS, SPLITS, THREADS, AttendOps, attend_bytes
from ling_kernels.cuda.sample import BLOCKS
from ling_kernels.ops import DRAFT_BEST, ROW_TILE, DraftLayerParams, DraftParams, KernelError, Proposal, Sampling

HEAD, TILES, STAGES = 128, 4, 2  # as in draft.cu
# (lanes to a row of W2, pieces of 8 a lane): for ranks up to 8 * lanes * pieces
PICKS = ((8, 1), (16, 1), (32, 1), (32, 2), (32, 4))
BLOCKS_PER_SM = 2


class DraftOps(AttendOps):
    """Contracts in `ling_kernels.ops.Ops`."""

    def draft_context(
        self, taps: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, positions: Tensor, rows: int
    ) -> None:
        _check(params)
        live = rows if rows <= ROW_TILE else None  # more of them: a prefill chunk
        context = self.linear(taps, params.fc, live)
        _, context = self.exchange_norm(None, context, params.hidden_norm, params.eps, live)
        for index, layer in enumerate(params.layers):
            fresh = self.linear(context, layer.in_proj[params.num_heads * HEAD :], live)
            self._heads(fresh, layer, params, cache[index], rope, positions, None, None, rows)

    def draft_block(
        self, x: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, length: Tensor, extent: int
    ) -> Tensor:
        _check(params)
        num, heads, each = x.shape[0], params.num_heads, params.num_heads // params.num_kv_heads
        if num > ROW_TILE:
            raise KernelError(f"a draft block of {num} rows: at most {ROW_TILE} are supported")
        sums, stats = self.attend_scratch(heads, HEAD, x)
        shared, capacity = attend_bytes(HEAD, HEAD, TILES, STAGES, same=False), cache.shape[2]
        partial = None
        for index, layer in enumerate(params.layers):
            x, h = self.exchange_norm(partial, x, layer.attention_norm, params.eps, num)
            q = x.new_empty(num, heads, HEAD)
            self._heads(self.linear(h, layer.in_proj, num), layer, params, cache[index], rope, None, length, q, num)
            args = [sums, stats, q, cache[index, 0], cache[index, 1], length]
            args += [heads, params.num_kv_heads, num, capacity, HEAD**-0.5]
            grid = (SPLITS, -(-each // TILES), params.num_kv_heads)
            self.device.launch("draft_attend", grid, THREADS, args, shared)
            mixed = x.new_empty(num, heads * HEAD)
            self.device.launch("draft_merge", (heads, num), MERGE_GROUPS * HEAD // 4, [mixed, sums, stats, length, num])
            partial = self.linear(mixed, layer.out_proj, num)
            x, h = self.exchange_norm(partial, x, layer.mlp_norm, params.eps, num)
            partial = self.mlp(h, layer.mlp, num)
        return self.exchange_norm(partial, x, params.norm, params.eps, num)[1]

    def _heads(
        self,
        proj: Tensor,
        layer: DraftLayerParams,
        params: DraftParams,
        cache: Tensor,
        rope: Tensor,
        positions: Tensor | None,
        length: Tensor | None,
        q: Tensor | None,
        rows: int,
    ) -> None:
        """Norm and turn heads; keys and values go into the cache [2, C, Hkv, head]. A block's own rows are written past
        the context, where they are never visible to another block and are written again before they are read."""
        query, kv = params.num_heads if q is not None else 0, params.num_kv_heads
        args = [proj, proj.shape[1], layer.q_norm, layer.k_norm, rope, params.rope_dim, int(params.neox)]
        args += [positions, length, q, cache[0], cache[1], query, kv, float(params.eps)]
        self.device.launch("draft_heads", (query + 2 * kv, rows), 32, args)

    def markov_pick(
        self, base: Tensor, h: Tensor, anchor: Tensor, params: DraftParams, positions: Tensor, sampling: Sampling
    ) -> Proposal:
        num, rank, where = base.shape[0], params.markov_w1.shape[1], base.device
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
            args += [params.temperatures[row:], confidence[row:], blocks, row, sampling.vocab, rank, h.shape[1]]
            self.device.launch(name, grid + 1, THREADS, [*args, int(params.confidence_with_markov)])
            if logits is not None:
                self.draw(logits, positions[row:], sampling, 1, drawn=drawn[row], most=DRAFT_BEST)
        tokens = torch.empty(num, dtype=torch.int64, device=where)
        self.device.launch("markov_tokens", num, 32, [drawn, blocks, tokens])
        return Proposal(tokens, confidence)

    def _markov_input(
        self, inputs: Tensor, hidden: Tensor, anchor: Tensor, drawn: Tensor, params: DraftParams, row: int
    ) -> None:
        """The gated or recurrent head's input to W2 in inputs[2]; its state alternates between the first two rows."""
        weight, bias = params.markov_extra
        rank, gates = inputs.shape[1], 1 if params.markov_head == "gated" else 3
        args = [weight, bias, params.markov_w1, hidden, inputs[row % 2], inputs[1 - row % 2], inputs[2], anchor, drawn]
        args += [drawn.shape[1], row, rank, hidden.shape[0], gates]
        self.device.launch("markov_input", -(-rank // 8), THREADS, args)


def _check(params: DraftParams) -> None:
    if params.head_dim != HEAD:
        raise KernelError(f"draft heads of {params.head_dim}: the kernels support {HEAD}")
    if params.num_heads % params.num_kv_heads:
        raise KernelError(f"{params.num_heads} draft heads do not share {params.num_kv_heads} key heads evenly")


def _pick_name(rank: int) -> str:
    for lanes, pieces in PICKS:
        if rank <= 8 * lanes * pieces and rank % 8 == 0:
            return f"markov_pick_{lanes}_{pieces}"
    raise KernelError(f"Markov rank {rank}: the kernels support multiples of 8 up to {8 * 32 * 4}")
