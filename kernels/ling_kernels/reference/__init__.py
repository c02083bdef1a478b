"""Plain torch: the definition of each op, and the CPU engine."""

from __future__ import annotations

from ling_kernels.reference import dense, draft, kda, mla, moe, sample


class ReferenceOps:
    """The contracts of `ling_kernels.ops.Ops`, one function each; runs on any torch device, written for the CPU."""

    embed = staticmethod(dense.embed)
    exchange_norm = staticmethod(dense.exchange_norm)
    linear = staticmethod(dense.linear)
    linear_partial = staticmethod(dense.linear)
    mlp = staticmethod(dense.mlp)
    head = staticmethod(dense.head)
    kda_verify = staticmethod(kda.verify)
    kda_prefill = staticmethod(kda.prefill)
    kda_commit = staticmethod(kda.commit)
    mla = staticmethod(mla.mla)
    route = staticmethod(moe.route)
    experts = staticmethod(moe.experts)
    verdict = staticmethod(sample.verdict)
    advance = staticmethod(sample.advance)
    expect = staticmethod(sample.expect)
    pick = staticmethod(sample.pick)
    draft_embed = staticmethod(draft.embed)
    draft_context = staticmethod(draft.context)
    draft_block = staticmethod(draft.block)
    markov_pick = staticmethod(draft.pick)
