"""A draft for a tiny trained target, from corpus to engine: text, training, export, figures, calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from draft_lab import write_corpus, write_target
from ling_local.engine.drafts import load_dspark
from ling_local.engine.layout import DRAFT_COPIES, draft_layout
from ling_local.engine.native import NativeEngine
from ling_local.engine.width import WidthRule
from ling_local.errors import EngineError, ModelError, UsageError
from ling_local.paths import demo_dir
from ling_local.train import draft_run
from ling_local.train.__main__ import app
from ling_local.train.draft_commands import parse_heats, parse_taps
from ling_local.train.draft_evaluate import Traces, figures, trace, walk
from ling_local.train.draft_export import DraftShape, check_shape, draft_json, export_draft, read_draft, spaced_taps
from ling_local.train.draft_loop import DraftPlan, DraftStep, train_draft
from ling_local.train.draft_net import make_draft_net, new_draft_params
from ling_local.train.draft_prompts import Prompts, load_prompts, make_prompts, save_prompts
from ling_local.train.draft_sampler import Rows, Sampler
from ling_local.train.draft_target import Target, open_target
from ling_local.train.shape import demo_config
from ling_local.types import TokenRequest

SHAPE = DraftShape(heads=2, head_dim=16, mlp=48, rank=16)
PLAN = DraftPlan(steps=50, rows=6, anchors=16, rate=2e-2, warmup=10, seed=2)
TEXT = draft_run.TextPlan(waves=1, rows=64, length=112)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lab") / "model"
    folder.mkdir()
    return write_target(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return open_target(folder)


@pytest.fixture(scope="module")
def prompts(folder: Path, corpus: Path) -> Prompts:
    return make_prompts(corpus, folder, 0, 240, 10, 1, {"code": 0.6, "chat": 0.4})


@pytest.fixture(scope="module")
def text(target: Target, prompts: Prompts) -> Rows:
    return draft_run.make_text(target, prompts.trained(), TEXT, 0.0, lambda line: None)


@pytest.fixture(scope="module")
def job(target: Target, tmp_path_factory: pytest.TempPathFactory) -> draft_run.Job:
    return draft_run.plan_job(target, SHAPE, -1, tmp_path_factory.mktemp("run"), lambda line: None)


@pytest.fixture(scope="module")
def trained(job: draft_run.Job, text: Rows) -> dict[str, torch.Tensor]:
    """Trained parameters; the run's log and state lie in job.run."""
    return draft_run.train(job, text, PLAN, resume=False)


@pytest.fixture(scope="module")
def traces(target: Target, prompts: Prompts) -> dict[str, Traces]:
    return draft_run.heldout_traces(target, prompts, 10, 48)


def accept_length(job: draft_run.Job, params, traces: dict[str, Traces], blind: bool = False) -> float:
    config = check_shape(job.data, job.target.config)
    lengths = []
    for each in traces.values():
        draft = make_draft_net(config, each.tokens.shape[1], "cpu", torch.float32)
        steps = walk(job.target, draft, {name: value.detach() for name, value in params.items()}, each, blind)
        lengths.append(figures(steps, len(each.tokens), config.block_size).accept_length)
    return float(np.mean(lengths))


def engine_steps(folder: Path, ids: tuple[int, ...], count: int, monkeypatch: pytest.MonkeyPatch) -> list:
    """Steps of the engine after its first, each verifying the whole block."""
    monkeypatch.setattr(WidthRule, "following", lambda self: self.block)
    monkeypatch.setattr(WidthRule, "width", lambda self, confidence, following: len(confidence) + 1)
    engine = NativeEngine.load(folder, draft="dspark")
    request = TokenRequest(ids, max_tokens=count, stop_ids=frozenset({0, 1}))
    return list(engine.generate(request))[1:]


def linked(folder: Path, copy: Path) -> Path:
    copy.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (copy / file.name).symlink_to(file)
    return copy


def test_a_trained_draft_accepts_more_than_a_new_one_in_the_engine(
    job, trained, traces, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    lengths = {}
    new = new_draft_params(check_shape(job.data, job.target.config), 2)
    for name, params in (("new", new), ("trained", trained)):
        copy = linked(folder, tmp_path / name)
        export_draft(params, job.data, job.target.config, copy / "dspark")
        emitted = steps = 0
        for tokens, first, _ in zip(*(part[:3] for part in traces["heldout_code"]), strict=True):
            made = engine_steps(copy, tuple(tokens[:first].tolist()), 40, monkeypatch)
            emitted, steps = emitted + sum(len(step.ids) for step in made), steps + len(made)
        lengths[name] = emitted / steps
    assert lengths["new"] < 1.5
    assert lengths["trained"] > 3.0


def test_the_walk_is_what_the_engine_does(job, trained, traces, folder: Path, tmp_path: Path, monkeypatch) -> None:
    copy = linked(folder, tmp_path / "model")
    export_draft(trained, job.data, job.target.config, copy / "dspark")
    config, params = read_draft(copy / "dspark", job.target.config)
    for each in traces.values():
        draft = make_draft_net(config, each.tokens.shape[1], "cpu", torch.float32)
        steps = walk(job.target, draft, params, each)
        for row in range(3):
            first = int(each.first[row])
            made = engine_steps(copy, tuple(each.tokens[row, :first].tolist()), 48, monkeypatch)
            assert [step.accepted for step in made] == steps.accepted[steps.row == row].tolist()
            emitted = [token for step in made for token in step.ids]
            assert emitted == each.tokens[row, first + 1 : each.end[row]].tolist()
        found = figures(steps, len(each.tokens), config.block_size)
        assert 1 + sum(found.by_position) == pytest.approx(found.accept_length)


def test_taps_are_used(job, trained, traces) -> None:
    assert accept_length(job, trained, traces) > accept_length(job, trained, traces, blind=True) + 0.5


def test_the_log_shows_the_accept_length_growing(job, trained) -> None:
    lines = [json.loads(line) for line in (job.run / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == PLAN.steps
    assert lines[-1]["tau"] > 2.0
    assert len(lines[-1]["alpha"]) == 8
    assert all(line["tok_s"] > 0 for line in lines)


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_gradients_reach_all_of_the_draft_and_none_of_the_target(target: Target, text: Rows, markov: str) -> None:
    config = check_shape(draft_json(replace(SHAPE, markov=markov), target.config, 2), target.config)
    params = {name: value.requires_grad_() for name, value in new_draft_params(config, 3).items()}
    with torch.no_grad():  # at its start the second table is zero and hides the first
        params["markov_head.markov_w2.weight"].normal_(0, 0.1)
        params["confidence_head.proj.weight"].normal_(0, 0.1)
    draft = make_draft_net(config, TEXT.length, "cpu", torch.float32)
    step = DraftStep(target, draft, params, text, replace(PLAN, rows=4))
    step.ramp.fill_(1.0)
    at = torch.stack([torch.nonzero(row)[:6, 0] for row in text.answered[:4]])
    losses = step.losses(text.tokens[:4].long(), text.answered[:4], text.temperature[:4], at)
    losses.total.backward()
    for name, value in params.items():
        assert value.grad is not None, name
        assert value.grad.abs().max() > 0, name
    assert not any(value.requires_grad or value.grad is not None for value in target.params.values())


def new_step(job: draft_run.Job, text: Rows, plan: DraftPlan) -> DraftStep:
    config = check_shape(job.data, job.target.config)
    params = {name: value.requires_grad_() for name, value in new_draft_params(config, plan.seed).items()}
    return DraftStep(job.target, make_draft_net(config, TEXT.length, "cpu", torch.float32), params, text, plan)


class NoHostReads(TorchDispatchMode):
    """Raises on every operation that a CUDA graph could not hold because the host waits for its value."""

    BANNED = ("_local_scalar_dense", "nonzero", "masked_select", "equal.default", "unique")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        indices = args[1] if name.startswith("aten.index") and isinstance(args[1], list | tuple) else ()
        masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype == torch.bool]
        if masks or any(banned in name for banned in self.BANNED):
            raise AssertionError(f"{name} reads a device value")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_steps_of_training_and_sampling_can_be_captured(target: Target, prompts: Prompts, text: Rows, markov: str):
    job = draft_run.plan_job(target, replace(SHAPE, markov=markov), -1, Path(), lambda line: None)
    step = new_step(job, text, replace(PLAN, rows=3, anchors=4))
    step.run(0, 0.0)
    sampler = Sampler(target, prompts, rows=4, length=12)
    sampler.run(0, torch.tensor([0.0, 0.5, 1.0, 1.0]), torch.arange(4))
    sampler.at.zero_()
    with NoHostReads():
        step._body()
        with torch.no_grad():
            sampler._step(12)
    with pytest.raises(AssertionError, match="reads a device value"), NoHostReads():
        step.rate.item()


def test_a_resumed_run_ends_where_an_unbroken_one_does(job: draft_run.Job, text: Rows, tmp_path: Path) -> None:
    plan = replace(PLAN, steps=6, rows=3, anchors=4)
    whole = draft_run.train(replace(job, run=tmp_path / "whole"), text, plan, resume=False)
    part = replace(job, run=tmp_path / "part")
    with pytest.raises(EngineError, match="nothing to resume from"):
        draft_run.train(part, text, plan, resume=True)
    step = new_step(job, text, replace(plan, save_minutes=0.0))
    run_step = step.run

    def run_three(number: int, done: float) -> None:
        if number == 3:
            raise KeyboardInterrupt
        run_step(number, done)

    step.run = run_three
    with pytest.raises(KeyboardInterrupt):
        list(train_draft(step, part.run, lambda line: None))
    resumed = draft_run.train(part, text, plan, resume=True)
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    with pytest.raises(EngineError, match="another plan"):
        draft_run.train(part, text, replace(plan, seed=9), resume=True)


def test_every_row_is_taken_once_before_any_comes_again(job: draft_run.Job, text: Rows) -> None:
    step = new_step(job, text, replace(PLAN, rows=5))
    size = len(text.tokens)
    taken = np.concatenate([step._rows(number) for number in range(2 * size // 5)])
    assert sorted(taken[:size]) == list(range(size))
    assert len(set(taken[size:])) == len(taken) - size > 50
    assert taken[:20].tolist() != taken[size : size + 20].tolist()


def test_export_has_the_published_layout_without_copies(job, trained, folder: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    size = export_draft(trained, job.data, job.target.config, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["architectures"] == ["LingDSparkModel"]
    assert data["mask_token_id"] == Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|mask|>")
    assert not any(isinstance(value, dict) for value in data.values())
    config = check_shape(data, job.target.config)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in found} == {"BF16"}
    assert found == {spec.name: spec.shape for spec in draft_layout(config) if spec.name not in DRAFT_COPIES}
    assert size == (tmp_path / "model.safetensors").stat().st_size
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o044 == 0o044
    lost = {name: value for name, value in trained.items() if name != "fc.weight"}
    with pytest.raises(ModelError, match=r"fc\.weight"):
        export_draft(lost, job.data, job.target.config, tmp_path)


def test_the_demo_models_draft_fits_its_budget() -> None:
    config = check_shape(draft_json(DraftShape(), demo_config(), 2), demo_config())
    count = sum(spec.numel for spec in draft_layout(config) if spec.name not in DRAFT_COPIES)
    assert 2 * count + 8192 < 4_000_000  # and a header
    assert config.target_layers == (1, 2, 3, 4)
    assert config.block_size == 8


def test_taps_are_spread_and_spare_the_last_layer() -> None:
    assert spaced_taps(42, 5) == (1, 11, 20, 30, 40)
    assert spaced_taps(4) == (1, 2)
    assert spaced_taps(2) == (0,)
    assert spaced_taps(1) == (0,)


def test_a_report_calibrates_and_the_engine_reads_it(job, trained, prompts, folder: Path, tmp_path: Path) -> None:
    export_draft(trained, job.data, job.target.config, tmp_path)
    result = draft_run.report(job.target, prompts, tmp_path, 6, 24, lambda line: None)
    assert set(result["accept"]) == {"heldout_code", "heldout_chat"}
    assert json.loads((tmp_path / "eval.json").read_text())["calibration"] == json.loads(
        (tmp_path / "confidence_calibration.json").read_text()
    )
    drafter = load_dspark(tmp_path, job.target.config, torch.float32, "cpu")
    assert drafter.params.temperatures.tolist() == pytest.approx(result["calibration"]["temperatures"])
    assert not torch.equal(drafter.params.temperatures, torch.ones(8))


def test_prompts_are_beginnings_of_texts_and_of_answers(folder: Path, corpus: Path, prompts: Prompts) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = {p.stem: [json.loads(line) for line in p.read_text().splitlines()] for p in corpus.glob("*.jsonl")}
    starts = prompts.starts
    for i, kind in enumerate(prompts.kinds):
        ids = prompts.tokens[starts[i] : starts[i] + prompts.lengths[i]].tolist()
        assert ids[0] == 0
        text = tokenizer.decode(ids[1:], skip_special_tokens=False)
        assert any(text in each for each in whole[str(kind)])
        if str(kind).endswith("chat"):
            assert text.endswith(("<think>", "<think></think>"))
            assert text.startswith("<role>SYSTEM</role>")
    assert set(prompts.trained().kinds) == {"code", "chat"}
    assert set(prompts.heldout()) == {"heldout_code", "heldout_chat"}
    assert {name: len(each) for name, each in prompts.heldout().items()} == dict.fromkeys(prompts.heldout(), 10)
    assert (prompts.kinds == "code").sum() == 144


def test_prompts_travel_in_a_file_and_conversations_go_through_the_template(
    folder: Path, corpus: Path, prompts: Prompts, tmp_path: Path
) -> None:
    save_prompts(prompts, tmp_path / "p.npz")
    again = load_prompts(tmp_path / "p.npz")
    assert all(np.array_equal(getattr(again, n), getattr(prompts, n)) for n in ("tokens", "lengths", "limits", "kinds"))
    (tmp_path / "p.npz").write_bytes(b"no")
    with pytest.raises(ModelError, match="cannot be read as prompts"):
        load_prompts(tmp_path / "p.npz")
    template = "{% for m in messages %}<role>{{ m.role }}</role>{{ m.content }}{% endfor %}<role>ASSISTANT</role>"
    model = linked(folder, tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "talk.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "a </think> b"}, {"role": "assistant", "content": "c"}]})
        + "\n"
    )
    made = make_prompts(tmp_path, model, None, 3, 0, 1, {"talk": 1.0})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(made) == 3
    text = tokenizer.decode(made.tokens[: made.lengths[0]].tolist(), skip_special_tokens=False)
    assert text == "<role>user</role>a </think> b<role>ASSISTANT</role>"
    assert tokenizer.token_to_id("</think>") not in made.tokens.tolist()


def test_text_mixes_temperatures_and_is_the_same_for_a_seed(target: Target, prompts: Prompts, text: Rows) -> None:
    plan = replace(TEXT, rows=8, waves=2, length=40)
    made = draft_run.make_text(target, prompts.trained(), plan, 0.0, lambda line: None)
    assert made.tokens.shape == (16, 40)
    assert torch.equal(made.tokens, draft_run.make_text(target, prompts.trained(), plan, 0.0, lambda line: None).tokens)
    assert {round(float(t), 1) for t in text.temperature} == {0.0, 0.6, 1.0}
    assert 0.3 < float(text.answered.float().mean()) < 0.9


def test_a_trace_is_the_answer_to_its_own_prompt_alone(target: Target, prompts: Prompts) -> None:
    chats = prompts.heldout()["heldout_chat"]
    found = trace(target, chats, 32)
    for row, (tokens, first, end) in enumerate(zip(*found, strict=True)):
        start = chats.starts[row] + 1
        assert tokens[:first].tolist() == chats.tokens[start : start + first].tolist()
        answer = tokens[first:end].tolist()
        assert 0 < len(answer) <= 32
        assert answer[-1] in target.stop_ids or len(answer) == 32
        assert not set(answer[:-1]) & set(target.stop_ids)


SMALL = ["--rows", "3", "--anchors", "4", "--waves", "1", "--text-rows", "8", "--length", "48", "--device", "cpu"]


def test_one_command_makes_a_draft_that_the_engine_loads(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr(draft_run, "FIGURES", (3, 8))
    model = linked(folder, tmp_path / "model")
    packed = tmp_path / "prompts.npz"
    runner = CliRunner()
    common = ["--target", str(model), "--seed", "3"]
    cut = [*common, "--corpus", str(corpus), "--out", str(packed), "--count", "40", "--heldout", "3"]
    assert runner.invoke(app, ["draft-prompts", *cut]).exit_code == 0
    shape = ["--head-dim", "16", "--mlp", "32", "--rank", "8", "--block", "5", "--taps", "0,2", "--markov", "rnn"]
    made = [*common, "--corpus", str(packed), "--out", str(model / "dspark"), "--run", str(tmp_path / "run")]
    result = runner.invoke(app, ["draft", *made, *SMALL, *shape, "--steps", "4"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "drafter dspark, block 5" in result.stderr
    assert NativeEngine.load(model, draft="auto").info.block == 5
    shown = runner.invoke(
        app,
        [
            "draft-eval",
            *common,
            "--corpus",
            str(packed),
            "--out",
            str(model / "dspark"),
            "--device",
            "cpu",
            "--answer",
            "8",
        ],
        catch_exceptions=False,
    )
    assert json.loads(shown.stdout)["accept"]["heldout_code"]["prompts"] == 3
    made = json.loads((model / "dspark" / "training.json").read_text())
    shipped = json.loads((demo_dir() / "dspark" / "training.json").read_text())
    assert (made["steps"], made["text_tokens"], made["machine"]) == (4, 8 * 48, "a CPU")
    assert {name: type(value) for name, value in made.items()} == {n: type(v) for n, v in shipped.items() if n in made}
    assert shipped.keys() - made.keys() == {"text_tok_s", "commit"}  # the card can do without


def test_the_ablation_compares_equal_steps_on_equal_text(
    folder: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    monkeypatch.setattr(draft_run, "FIGURES", (3, 8))
    flags = ["--target", str(folder), "--corpus", str(corpus), "--run", str(tmp_path), "--steps", "3", *SMALL]
    result = CliRunner().invoke(
        app, ["draft-ablation", *flags, "--count", "40", "--heldout", "3"], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "ablation.json").read_text())
    assert (found["without"]["length_weight"], found["with"]["length_weight"]) == (0.0, 0.1)
    for name in ("without", "with"):
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        assert json.loads(lines[-1])["step"] == 3
    assert "| heldout_chat |" in result.stdout


def test_what_cannot_be_is_refused_with_the_reason(folder: Path, target: Target, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not layer numbers"):
        parse_taps("1,b")
    for text in ("x=1", "0.5", "-1=1", "0=0"):
        with pytest.raises(UsageError, match="heats"):
            parse_heats(text)
    assert parse_heats("0=0.5,0.6=1") == ((0.0, 0.5), (0.6, 1.0))
    with pytest.raises(UsageError, match="no NAME"):
        make_prompts(tmp_path, folder, 0, 5, 5, 1, {})
    with pytest.raises(ModelError, match="not there"):
        draft_run.open_prompts(tmp_path / "none", folder, 1, 1, 1)
    with pytest.raises(ModelError, match="target_layer_ids"):
        draft_run.plan_job(target, replace(SHAPE, taps=(2, 9)), -1, tmp_path, lambda line: None)
    if not torch.cuda.is_available():
        with pytest.raises(EngineError, match="no CUDA device"):
            open_target(folder, "cuda")
