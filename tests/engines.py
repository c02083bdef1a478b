"""Engines that cost next to nothing: new ones over weights that are loaded already."""

from __future__ import annotations

import copy
import dataclasses

from ling_local.engine.native import NativeEngine


def another(engine: NativeEngine, context: int = 0) -> NativeEngine:
    """A new engine over the weights of a loaded one, with a state, ops and times of its own. context: 0 for as much."""
    info = dataclasses.replace(engine.info, context_limit=context or engine.info.context_limit)
    return NativeEngine(engine.weights, info, engine.vocab, engine.drafter, copy.copy(engine.ops))
