"""The training forward against the goldens, and its parts against plain definitions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ling_local.engine.config import load_model_config
from ling_local.train.kda import kda_chunked
from ling_local.train.net import forward, logits, make_net, top_mask
from ling_local.train.weights import export_checkpoint, new_params, read_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
TOLERANCE = 2e-3  # golden README: fp32, every logit


@pytest.mark.parametrize("length", [1, 7, 65, 130])
@pytest.mark.parametrize("model", ["flashlike", "tinylike_realdims"])
def test_forward_gives_the_golden_logits(model: str, length: int) -> None:
    folder = GOLDEN / model
    net, params = make_net(load_model_config(folder)), read_checkpoint(folder)
    golden = np.load(folder / "golden.npz")
    ids = torch.tensor(golden[f"prompt_{length}"], dtype=torch.long)[None]
    # the last MTP row of the golden uses the first generated token: append it, drop its own rows
    ids = torch.cat((ids, torch.tensor([[int(golden[f"greedy_tokens_{length}"][0])]])), 1)
    out = forward(net, params, ids)
    main = logits(net, params, out.hidden)[:length].detach().numpy()
    assert np.abs(main - golden[f"prefill_logits_{length}"]).max() <= TOLERANCE
    if f"mtp_logits_{length}" in golden:
        assert out.mtp is not None
        drafted = logits(net, params, out.mtp)[:length].detach().numpy()
        assert np.abs(drafted - golden[f"mtp_logits_{length}"]).max() <= TOLERANCE


def test_sequences_of_a_batch_do_not_touch_each_other() -> None:
    folder = GOLDEN / "flashlike"
    net, params = make_net(load_model_config(folder)), read_checkpoint(folder)
    ids = torch.randint(0, 96, (3, 37), generator=torch.Generator().manual_seed(1))
    together = forward(net, params, ids).hidden.view(3, 37, -1)
    for row in range(3):
        alone = forward(net, params, ids[row : row + 1]).hidden
        assert (together[row] - alone).abs().max() < 1e-4


def _recurrence(q, k, v, g, beta):
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
    rows = []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        read = (state * k[:, t][..., None]).sum(-2)
        update = beta[:, t][..., None] * (v[:, t] - read)
        state = state + k[:, t][..., None] * update[..., None, :]
        rows.append((state * q[:, t][..., None]).sum(-2))
    return torch.stack(rows, 1)


@pytest.mark.parametrize(("length", "strong"), [(1, False), (63, True), (64, False), (150, True)])
def test_chunked_kda_is_the_recurrence_with_its_gradients(length: int, strong: bool) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v, g = (torch.randn(2, length, 2, 32, generator=generator, dtype=torch.float64) for _ in range(4))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g = -5 * torch.sigmoid(g + (8 if strong else -3))  # strong: nearly -5 at every step, the worst case
    beta = torch.rand(2, length, 2, generator=generator, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
    narrow = [x.detach().float().requires_grad_() for x in inputs]
    expected, got = _recurrence(*inputs), kda_chunked(*narrow)
    assert (got.double() - expected).abs().max() < 1e-4
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weight).sum().backward()
    (got * weight.float()).sum().backward()
    for wide, single in zip(inputs, narrow, strict=True):
        assert (single.grad.double() - wide.grad).norm() <= 1e-3 * wide.grad.norm() + 1e-6


def test_top_mask_takes_the_largest_and_the_lower_index_of_equals() -> None:
    x = torch.tensor([[0.5, 2.0, -torch.inf, 2.0, 1.0]])
    assert top_mask(x, 1).tolist() == [[False, True, False, False, False]]
    assert top_mask(x, 3).tolist() == [[False, True, False, True, True]]


def test_an_exported_model_reloads_with_the_same_tensors(tmp_path: Path) -> None:
    config = load_model_config(GOLDEN / "flashlike")
    params = new_params(config, seed=5)
    export_checkpoint(params, config, tmp_path)
    again = read_checkpoint(tmp_path)
    assert again.keys() == params.keys()
    for name, value in params.items():
        assert again[name].shape == value.shape
        assert torch.allclose(again[name], value, atol=1e-2, rtol=1e-2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] > 0
    export_checkpoint(again, config, tmp_path / "twice")
    twice = read_checkpoint(tmp_path / "twice")
    ids = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(2))
    first, second = (forward(make_net(config), p, ids).hidden for p in (again, twice))
    assert torch.equal(first, second)
