"""The loop, its data order and its optimiser, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from ling_local.engine.config import load_model_config
from ling_local.errors import EngineError, ModelError
from ling_local.paths import demo_dir
from ling_local.train.batches import Mix, Sampler
from ling_local.train.card import draft_section, write_card
from ling_local.train.corpus import TokenSet
from ling_local.train.evaluate import evaluate, windows
from ling_local.train.loop import Plan, Step, train
from ling_local.train.net import make_net
from ling_local.train.optim import Optimizer, Recipe, is_matrix, orthogonal
from ling_local.train.run import on_device, sample
from ling_local.train.stepping import schedule
from ling_local.train.weights import new_params

CONFIG = load_model_config(Path(__file__).parents[1] / "golden" / "flashlike")
PLAN = Plan(steps=16, rows=4, length=32, long_length=64, long_part=0.2, warmup=3, graph=False, rate=8e-3)


def _tokens(documents: int = 40, length: int = 30) -> TokenSet:
    rng = np.random.default_rng(7)
    one = rng.integers(1, 96, length).astype(np.uint16)
    one[-1] = 0
    return TokenSet(np.tile(one, documents), np.arange(documents, dtype=np.int64) * length, documents * length)


def _step(tokens: TokenSet) -> tuple[Step, Sampler]:
    params = on_device(new_params(CONFIG, seed=1), "cpu", trained=True)
    step = Step(
        make_net(CONFIG), params, Optimizer(params, Recipe()), torch.from_numpy(tokens.tokens.astype("int16")), end_id=0
    )
    return step, Sampler({"code": tokens}, seed=1, mix={"code": Mix(1.0, 0.5)})


def _run(plan: Plan, folder: Path, resume: bool = False) -> tuple[Step, list[dict[str, float]]]:
    step, sampler = _step(_tokens())
    return step, list(train(step, sampler, plan, folder, lambda text: None, resume))


def test_a_tiny_run_learns_its_text_with_both_losses(tmp_path: Path) -> None:
    step, sampler = _step(_tokens())
    net, before = step.net, evaluate(step.net, step.params, _tokens(4), context=512)
    lines = list(train(step, sampler, PLAN, tmp_path, lambda text: None))
    after = evaluate(net, step.params, _tokens(4), context=512)
    assert lines[-1]["step"] == PLAN.steps
    assert after.loss_nats < 0.6 * before.loss_nats
    assert after.top1 > before.top1
    assert all(bias.abs().max() > 0 for bias in step.biases.values())


def test_a_resumed_run_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    plan = replace(PLAN, steps=8)
    whole, _ = _run(plan, tmp_path / "whole")
    broken = replace(plan, save_minutes=0.0)  # saves after every step

    class Halt(Exception):
        pass

    def stop_at(text: str) -> None:
        nonlocal saves
        saves += 1
        if saves == 4:
            raise Halt

    saves = 0
    step, sampler = _step(_tokens())
    with pytest.raises(Halt):
        list(train(step, sampler, broken, tmp_path / "halted", stop_at))
    assert torch.load(tmp_path / "halted" / "state.pt", weights_only=True)["step"] == 4
    again, _ = _run(plan, tmp_path / "halted", resume=True)
    for name, value in whole.params.items():
        assert torch.allclose(again.params[name], value, atol=1e-5), name


def test_resume_refuses_another_plan_and_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="nothing to resume"):
        _run(PLAN, tmp_path, resume=True)
    _run(replace(PLAN, steps=2), tmp_path)
    with pytest.raises(EngineError, match="another plan"):
        _run(PLAN, tmp_path, resume=True)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    plan = replace(PLAN, steps=100, warmup=10, flat=0.5)
    rates = [schedule(plan, step, step / 100) for step in range(100)] + [schedule(plan, 100, 1.0)]
    assert rates[0] == pytest.approx(plan.rate / 10)
    assert max(rates) == rates[30] == plan.rate
    assert all(a >= b for a, b in pairwise(rates[50:]))
    assert rates[-1] == 0.0


def test_an_epoch_sees_every_row_once_and_steps_are_reproducible() -> None:
    tokens = TokenSet(np.arange(1000, dtype=np.uint16), np.array([0, 400]), 1000)
    sampler = Sampler({"code": tokens}, seed=3, mix={"code": Mix(1.0, 0.0)})
    rows = [sampler.starts(at, 4, 50) for at in range(0, 16, 4)]
    starts = np.concatenate(rows)
    assert len(set(starts.tolist())) == len(starts)
    assert starts.max() + 51 <= 1000
    again = Sampler({"code": tokens}, seed=3, mix={"code": Mix(1.0, 0.0)})
    assert np.array_equal(again.starts(12, 4, 50), rows[3])  # any step by itself
    snapped = Sampler({"code": tokens}, seed=3, mix={"code": Mix(1.0, 1.0)}).starts(0, 8, 50)
    assert set(snapped.tolist()) <= {0, 400}


def test_sets_share_a_step_as_the_mix_says() -> None:
    sets = {name: _tokens() for name in ("code", "chat")}
    sampler = Sampler(sets, seed=1, mix={"code": Mix(0.75, 0.0), "chat": Mix(0.25, 1.0)})
    assert sampler.counts(8) == {"code": 6, "chat": 2}
    starts = sampler.starts(0, 8, 32)
    assert (starts[:6] < 1200).all()
    assert (starts[6:] >= 1200).all()
    assert sampler.joined().shape == (2400,)


def test_orthogonal_brings_singular_values_near_one() -> None:
    matrix = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1))
    for given in (matrix, matrix.mT):
        values = torch.linalg.svdvals(orthogonal(given))
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_muon_takes_hidden_matrices_only() -> None:
    params = new_params(CONFIG, seed=1)
    chosen = {name for name, value in params.items() if is_matrix(name, value)}
    assert "model.layers.3.mlp.experts.up_proj.weight" in chosen
    assert "model.layers.5.attention.kv_b_proj.weight" in chosen
    for word in ("norm", "conv1d", "word_embeddings", "lm_head", "mlp.gate.", "A_log", "dt_bias"):
        assert not any(word in name for name in chosen)


def test_windows_cut_long_documents_and_leave_out_end_tokens() -> None:
    tokens = TokenSet(np.array([5, 6, 7, 0, 8, 9, 0], dtype=np.uint16), np.array([0, 4]), 6)
    assert [piece.tolist() for piece in windows(tokens, 100)] == [[5, 6, 7], [8, 9]]
    assert [piece.tolist() for piece in windows(tokens, 2)] == [[5, 6], [8, 9]]  # a single token predicts nothing


def test_padding_does_not_change_the_figures() -> None:
    net, params = make_net(CONFIG), new_params(CONFIG, seed=2)
    rng = np.random.default_rng(5)
    tokens = rng.integers(1, 96, 200).astype(np.uint16)
    both = TokenSet(tokens, np.array([0, 150]), 200)
    parts = [TokenSet(tokens[:150], np.array([0]), 150), TokenSet(tokens[150:], np.array([0]), 50)]
    together = evaluate(net, params, both, context=512)
    alone = [evaluate(net, params, part, context=512) for part in parts]
    assert together.predicted_tokens == sum(figures.predicted_tokens for figures in alone)
    expected = sum(f.loss_nats * f.predicted_tokens for f in alone) / together.predicted_tokens
    assert together.loss_nats == pytest.approx(expected, rel=1e-5)


def test_the_card_is_written_from_what_was_measured(tmp_path: Path) -> None:
    work, run, out = tmp_path / "work", tmp_path / "run", tmp_path / "out"
    for folder in (work / "tokens", run, out):
        folder.mkdir(parents=True)
    with pytest.raises(ModelError, match=r"plan\.json: not there"):
        write_card(work, out, run, "a machine")
    figures = {"top1": 0.625, "loss_nats": 1.5, "bits_per_byte": 0.7, "mtp_top1": 0.5, "predicted_tokens": 1234}
    names = ("heldout_code", "unseen_code", "heldout_prose", "heldout_chat")
    sample = {"kind": "code", "prompt": "def add(a, b):\n    return", "output": " a + b\n"}
    evaluation = {"device": "cpu", "dtype": "float32", **dict.fromkeys(names, figures)}
    (run / "plan.json").write_text(json.dumps(asdict(PLAN)))
    (run / "eval.json").write_text(json.dumps(evaluation))
    (run / "samples.json").write_text(json.dumps([sample]))
    line = {"elapsed_s": 600.0, "tokens": 5_000_000, "step": 99, "tok_s": 1_000, "loss": 1.25, "mtp_loss": 1.5}
    (run / "log.jsonl").write_text(json.dumps(line) + "\n")
    (work / "corpus.json").write_text(json.dumps({"code": {"documents": 7, "bytes": 70}}))
    (work / "tokens" / "code.json").write_text(json.dumps({"tokens": 20, "bytes": 70, "blocks": []}))
    write_card(work, out, run, "a machine")
    text = (out / "README.md").read_text(encoding="utf-8")
    for expected in (
        "62.5%",
        "a machine: 10.0 minutes",
        "5,000,000 tokens in 99 steps",
        " a + b",
        "| sympy |",
        "9,722,984",
    ):
        assert expected in text
    assert "$" not in text


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json: not there"):
        sample(tmp_path, tmp_path, lambda text: None)


def test_the_shipped_card_says_what_the_files_of_the_draft_say() -> None:
    assert draft_section(demo_dir() / "dspark") in (demo_dir() / "README.md").read_text(encoding="utf-8")
