"""Where a window's results lie that the next kernel may look for."""

from __future__ import annotations

import pytest
import torch

from ling_kernels.cuda.blank import Blanks

LIKE = torch.empty(0, dtype=torch.bfloat16)


class Captures:
    """A device, of which only the number of its capture matters here."""

    number = 0

    def capture(self) -> int:
        return self.number


@pytest.fixture
def captures() -> Captures:
    return Captures()


@pytest.fixture
def blanks(captures: Captures) -> Blanks:
    return Blanks(captures)


def layer(blanks: Blanks, rows: int) -> list[torch.Tensor]:
    """The results of a layer, after its mixer."""
    parts = blanks.empty(LIKE, rows, 3, 16, 48, dtype=torch.float32)
    return [parts, blanks.empty(LIKE, rows, 16, 40), blanks.empty(LIKE, rows, 1, 100, dtype=torch.int32)]


@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_results_of_live_rows_lie_side_by_side_in_what_is_made_blank(blanks: Blanks, rows: int) -> None:
    assert blanks.renew(rows, LIKE) == [None, 0]  # nobody knows yet how much
    assert not any(blanks.has(result) for result in layer(blanks, rows))
    memory, words = blanks.renew(rows, LIKE)
    memory[: 16 * words] = 255
    for number, result in enumerate(layer(blanks, rows)):
        assert blanks.has(result)
        assert result.data_ptr() % 16 == 0
        live = result[..., :rows, :]
        assert bool((live.contiguous().view(torch.uint8) == 255).all())
        live.fill_(number)
    *_, last = layer(blanks, rows)  # more than there was: in memory of their own
    assert not blanks.has(last)
    assert int((memory[: 16 * words] == 255).sum()) < 3 * 16  # what aligns them


def test_shapes_and_kinds_are_as_asked_for(blanks: Blanks) -> None:
    for _ in range(2):
        blanks.renew(4, LIKE)
        shapes = [(result.shape, result.dtype) for result in layer(blanks, 4)]
        assert shapes == [((3, 16, 48), torch.float32), ((16, 40), torch.bfloat16), ((1, 100), torch.int32)]


def test_what_a_mixer_reads_and_makes_may_lie_in_the_memory_before(blanks: Blanks) -> None:
    for _ in range(3):
        blanks.renew(1, LIKE)
        results = layer(blanks, 1)
    blanks.renew(1, LIKE)
    assert blanks.has(*results)
    blanks.renew(1, LIKE)
    assert not blanks.has(*results)


def test_another_capture_starts_without(blanks: Blanks, captures: Captures) -> None:
    for number in (0, 1, 2):
        captures.number = number
        assert not blanks.has(blanks.empty(LIKE, 1, 16, 8))
        for _ in range(2):
            blanks.renew(1, LIKE)
            results = layer(blanks, 1)
        assert blanks.has(*results)
        captures.number = -1
        assert not blanks.has(results[0])
        assert not blanks.has(blanks.empty(LIKE, 1, 16, 8))


def test_what_comes_after_the_layers_needs_no_room(blanks: Blanks) -> None:
    sizes = set()
    for _ in range(3):
        blanks.renew(1, LIKE)
        layer(blanks, 1)
        sizes.add(blanks.renew(1, LIKE)[1])
        blanks.end()
        assert not blanks.has(layer(blanks, 1)[0])
        for _ in range(5):
            layer(blanks, 1)
    assert len(sizes) == 1


def test_each_number_of_rows_has_its_own_room(blanks: Blanks) -> None:
    sizes = {}
    for _ in range(2):
        for rows in (1, 9):
            blanks.end()
            for _ in range(2):
                sizes[rows] = blanks.renew(rows, LIKE)[1]
                layer(blanks, rows)
    assert sizes[9] > 5 * sizes[1]


def test_switched_off_there_is_none(blanks: Blanks) -> None:
    blanks.on = False
    for _ in range(3):
        assert blanks.renew(1, LIKE) == [None, 0]
        assert not blanks.has(layer(blanks, 1)[0])


def test_nothing_is_never_there(blanks: Blanks) -> None:
    for _ in range(2):
        blanks.renew(1, LIKE)
        results = layer(blanks, 1)
    assert not blanks.has(results[0], None)
    assert not blanks.has(torch.empty(4))
