"""The ops of the one decode step: their contracts, and the parameters that they take.

An op is cut where a launch is cut. `reference` defines each in plain torch; other devices say how it is done fast.
Nothing here reads a device value on the host.

Letters: D hidden, H heads on this rank, P = H * head size, W live rows of the window (1..16), R rows of the buffer
(ROW_TILE for a window, T for a prefill chunk), V vocabulary, E experts, K chosen, I expert width, C cache rows,
N ranks. "act" is the engine's dtype (fp32 or bf16).

Rows: a window's buffers have ROW_TILE rows, of which the first W are live; what the rest hold is never looked at.
A live row's bits do not depend on W, on its place in the window, or on what the other rows hold. `rows` is W, a host
value; a device need not compute or write the rows past it. None stands for a prefill chunk: all rows are live, and
bits may depend on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

ROW_TILE = 16
MAX_STOP_IDS = 16
DRAFT_BEST = 64  # a draft is drawn from so many best tokens at most
STOPPED_EOS, STOPPED_LENGTH = 1, 2
ERROR_NON_FINITE = 1
RING_HEADER = 6  # step number, count, drafted, accepted, finish, error; then ROW_TILE ids, and as many confidences


class KernelError(Exception):
    """An op was called outside its contract, or a device refused it."""


@dataclass(frozen=True, slots=True)
class KdaParams:
    """KDA layer on one rank. in_proj [5P+H, D] rows q‖k‖v‖f‖g‖b; conv [3P, 4]; a_log [H], dt_bias [P] fp32;
    o_norm [head]; out_proj [D, P]."""

    in_proj: Tensor
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    out_proj: Tensor
    num_heads: int
    lower_bound: float
    eps: float


@dataclass(frozen=True, slots=True)
class MlaParams:
    """MLA layer on one rank. in_proj [Q + L + r + H, D] rows query (or its low-rank part)‖latent‖rope key‖gate;
    q_norm [q_rank], q_b_proj [H*(n+r), q_rank] or None; kv_norm [L]; w_uk [H, n, L]; w_uv [H, v, L];
    out_proj [D, H*v]. n, r, v: nope, rope and value head sizes; L: latent."""

    in_proj: Tensor
    q_norm: Tensor | None
    q_b_proj: Tensor | None
    kv_norm: Tensor
    w_uk: Tensor
    w_uv: Tensor
    out_proj: Tensor
    num_heads: int
    rope_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class MlpParams:
    """Dense SwiGLU. gate_up [2I, D] rows gate‖up; down [D, I]; limit 0: no clamp."""

    gate_up: Tensor
    down: Tensor
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class MoeParams:
    """Routed and shared experts. gate [E, D] fp32; bias [E] fp32; gate_up [E, 2I, D]; down [E, D, I]; shared: the
    shared expert's MLP, which gets neither router weight nor scale."""

    gate: Tensor
    bias: Tensor
    gate_up: Tensor
    down: Tensor
    shared: MlpParams
    experts_per_token: int
    n_group: int
    topk_group: int
    scale: float
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftLayerParams:
    """One layer of a DSpark draft. in_proj [(Hq + 2 Hkv) * head, D] rows q‖k‖v; q_norm, k_norm [head]; out_proj
    [D, Hq * head]."""

    attention_norm: Tensor
    in_proj: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out_proj: Tensor
    mlp_norm: Tensor
    mlp: MlpParams


@dataclass(frozen=True, slots=True)
class DraftParams:
    """A DSpark draft (dspark.md sections 1 to 6). fc [D, taps * D]; markov_w1, markov_w2 [V, r]; markov_extra: gated:
    weight [r, D+r] and bias [r]; rnn: weight [3r, 2r+D] and bias [3r]; vanilla: nothing.
    confidence [1, D (+r)] and bias, or None; temperatures [block] fp32, its calibration by position.

    neox: rope turns halves (i, i + dim/2) instead of pairs (2i, 2i+1); rope_dim: how many of a head's values turn.
    from_anchor: row 0 of a block, whose input is the anchor, gives the first draft.
    """

    fc: Tensor
    hidden_norm: Tensor
    layers: tuple[DraftLayerParams, ...]
    norm: Tensor
    markov_w1: Tensor
    markov_w2: Tensor
    markov_head: str
    markov_extra: tuple[Tensor, ...]
    confidence: Tensor | None
    confidence_bias: Tensor | None
    confidence_with_markov: bool
    temperatures: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dim: int
    neox: bool
    from_anchor: bool
    block_size: int
    mask_id: int
    eps: float


class Proposal(NamedTuple):
    """drafts [n] int64; confidence [n] fp32: estimated chance that each is accepted if those before it are."""

    drafts: Tensor
    confidence: Tensor


class Routing(NamedTuple):
    """experts [R, K] int64, best first; weights [R, K] fp32, normalised and scaled. In the device's own form, where it
    has one: plan, the same for its experts op; begun, what of that is done already, with the same h and parameters."""

    experts: Tensor
    weights: Tensor
    plan: Tensor | None = None
    begun: Tensor | None = None


class KdaStaged(NamedTuple):
    """What kda_commit needs to advance a layer by any prefix of the window; its form is the device's own. advanced: if
    the state is to advance by the window's one row, it has done so already."""

    states: Tensor
    inputs: Tensor
    advanced: bool = False


class Limits(NamedTuple):
    """Device words that end a generation. remaining [] int64: tokens still wanted; stop_ids [MAX_STOP_IDS] int64,
    -1 for unused; done [] bool; step [] int64: number of the step."""

    remaining: Tensor
    stop_ids: Tensor
    done: Tensor
    step: Tensor


class Sampling(NamedTuple):
    """greedy is a host value, fixed when a graph is captured; the rest are device scalars: temperature [] fp32,
    top_k [] int64 (0: off), top_p [] fp32, seed [] int64. vocab: ids at and above it are padding, never chosen."""

    greedy: bool
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    vocab: int


class Verdict(NamedTuple):
    """tokens [W] int64: the target's choice after each row; count [] int64: how many of them are committed (0 once
    done); anchor [] int64: the last committed one; done [] bool; entry [RING_HEADER + ROW_TILE] int64: the ring's."""

    tokens: Tensor
    count: Tensor
    anchor: Tensor
    done: Tensor
    entry: Tensor

    @property
    def following(self) -> Tensor:
        """The token after each row of the tile, [ROW_TILE]; meaningful for the committed rows."""
        return self.entry[RING_HEADER:]


class Ops(Protocol):
    """One implementation per device."""

    def embed(self, ids: Tensor, table: Tensor, lazy: bool = False) -> Tensor:
        """ids [R] int64, table [V, D] -> x [R, D] act, the residual stream. lazy: the next op is `exchange_norm` of x
        without a partial, so a device may leave the work to that."""
        ...

    def exchange_norm(
        self,
        partial: Tensor | None,
        x: Tensor,
        weight: Tensor,
        eps: float,
        rows: int | None = None,
        lazy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Sum `partial` over ranks in rank order, add it to x [R, D], and RMS-normalise: the new x and h.

        partial: [R, D] act or, where a device leaves a window's sums in parts, those [S, R, D] in fp32, which are added
        in order. Statistics in fp32. partial None: only the norm. lazy: the next op is `linear` or `route` of h and
        nothing reads x or h before it, so a device may leave the work to that. Source: ling3-model.md section 4.
        """
        ...

    def linear(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        """h [R, k] act @ weight [n, k]^T -> [R, n] act, accumulated in fp32."""
        ...

    def linear_partial(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        """The same product as a partial: a tensor that only exchange_norm reads."""
        ...

    def kda_verify(
        self, proj: Tensor, conv: Tensor, state: Tensor, params: KdaParams, rows: int, limits: Limits | None = None
    ) -> tuple[Tensor, KdaStaged]:
        """KDA over a window, raw projections to gated output. Reads conv and state; without limits it writes neither.

        proj [R, 5P+H] act, q‖k‖v‖f‖g‖b; conv [3, 3P] act, raw inputs before the window; state [H, 128, 128] fp32 as
        [value, key]; rows = W. -> o [R, P] act (rows past W are zero), staged. The recurrence is sequential in fp32
        with one order of operations. limits: of a step, which keeps its only row unless the sequence is done or nothing
        is remaining, so that with one row a device may advance the state at once; where that row's logits turn out not
        to be finite, the state is lost. Source: ling3-model.md 4.1, dspark.md 9.
        """
        ...

    def kda_prefill(self, proj: Tensor, conv: Tensor, state: Tensor, params: KdaParams) -> Tensor:
        """The same over T rows in chunks; advances conv and state in place. -> o [T, P] act."""
        ...

    def kda_commit(
        self, staged: list[KdaStaged], conv: Tensor, state: Tensor, count: Tensor, lazy: bool = False
    ) -> None:
        """Advance all layers by the first `count` [] rows of the window they staged; 0 changes nothing.

        conv [layers, 3, 3P], state [layers, H, 128, 128], in place. Equal to the bit to one-row steps. lazy: `advance`
        of the verdict that has this count follows, and nothing reads conv or state before it, so a device may leave the
        work to that.
        """
        ...

    def mla(
        self,
        proj: Tensor,
        cache: Tensor,
        rope: Tensor,
        positions: Tensor,
        params: MlaParams,
        rows: int,
        extent: int,
    ) -> Tensor:
        """Absorbed latent attention, projections to gated heads. Writes rows `positions[:rows]` of the cache.

        proj [R, Q+L+r+H] act; cache [C, L+r] act; rope [C, r] fp32 as cos‖sin; positions [R] int64, consecutive;
        extent: a host bound, no live position lies at or past it; bits do not depend on it. -> [R, H*v] act.
        Causal. Keys are read in splits of fixed size from position 0 and merged in order. Source: ling3-model.md 4.2.
        """
        ...

    def mlp(self, h: Tensor, params: MlpParams, rows: int | None = None) -> Tensor:
        """SwiGLU [R, D] -> partial (see exchange_norm). Source: ling3-model.md 4.4 to 4.6."""
        ...

    def route(self, h: Tensor, params: MoeParams, rows: int | None = None, lazy: bool = False) -> Routing:
        """Group-limited sigmoid router in fp32; equal scores: the lower id wins. Source: ling3-model.md 4.3. lazy: the
        next op is `experts` of it and nothing reads the routing before it, so a device may leave it to that."""
        ...

    def experts(self, h: Tensor, routing: Routing, params: MoeParams, rows: int | None) -> Tensor:
        """Chosen experts and the shared one, summed in fp32: a partial (see exchange_norm). routing: of the same h and
        rows, by `route`, or experts and weights alone. rows None: a prefill chunk, where the host may look at it."""
        ...

    def head(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        """h [R, D] act @ weight [V, D]^T -> logits [R, V] fp32, accumulated and kept in fp32."""
        ...

    def verdict(
        self,
        logits: Tensor,
        drafts: Tensor | None,
        positions: Tensor,
        sampling: Sampling,
        limits: Limits,
        rows: int,
    ) -> Verdict:
        """Choose the target's token after each live row, accept the drafts that agree, cut at stop id and limit.

        logits [R, V] fp32, row j after position positions[j]; drafts [W-1] int64 or None at W = 1. A row's choice
        depends on its logits, the seed and its position only, so drafts never change what is emitted. Rows that
        would be committed must be finite, else count is 0 and the entry carries ERROR_NON_FINITE.
        """
        ...

    def advance(self, verdict: Verdict, ring: Tensor, positions: Tensor, anchor: Tensor, limits: Limits) -> None:
        """Move a sequence's words past what a step committed, in place: positions [ROW_TILE] of a window's rows and
        anchor [] int64, the limits' own; and write its entry, padded with zeros, into row step % S of ring
        [S, RING_HEADER + 2 * ROW_TILE] int64. Does what a lazy kda_commit has left, too."""
        ...

    def expect(self, proposal: Proposal, drafts: Tensor, ring: Tensor, step: Tensor) -> None:
        """Keep n drafts in the first of drafts [ROW_TILE - 1] int64, and their confidences, in millionths, behind the
        ids of the entry of the step before `step` [], in row (step - 1) % S of the ring."""
        ...

    def pick(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Proposal:
        """Draft by the target's own rule, but from the DRAFT_BEST best tokens at most, of logits [n, V] fp32; positions
        [n] as in markov_pick. The confidence is the draft's own probability."""
        ...

    def draft_context(
        self, taps: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, positions: Tensor, rows: int
    ) -> None:
        """Write the keys and values of tokens that the target has processed into the draft's context.

        taps [R, taps * D] act, the residual stream after the tapped layers; cache [layers, 2, C, Hkv, head] act;
        rope [C, rope_dim] fp32 cos‖sin; rows `positions[:rows]` are written. Row-exact. Source: dspark.md section 3.
        """
        ...

    def draft_embed(self, anchor: Tensor, length: Tensor, table: Tensor, mask: int, num: int) -> tuple[Tensor, Tensor]:
        """A block's input: embeddings x [num, D] act of `anchor` [] and of num - 1 masks, and positions [num] int64,
        `length` [] and on. Source: dspark.md section 4."""
        ...

    def draft_block(
        self, x: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, length: Tensor, extent: int
    ) -> Tensor:
        """The draft's layers over one block: embeddings x [n, D] of anchor and masks at positions length.. -> h [n, D].

        Rows see the context rows before `length` [] and all rows of the block. Source: dspark.md section 4.
        """
        ...

    def markov_pick(
        self, base: Tensor, h: Tensor, anchor: Tensor, params: DraftParams, positions: Tensor, sampling: Sampling
    ) -> Proposal:
        """Pick drafts left to right: base [n, V] fp32 logits and h [n, D] of the rows that predict them, plus a bias
        from the token before. positions [n]: of the rows that will verify them, which key the noise, so that draft
        and target draw with the same noise; from the DRAFT_BEST best tokens at most, of which equal ones may fall out
        at the end. Source: dspark.md sections 5 and 6.1.
        """
        ...
