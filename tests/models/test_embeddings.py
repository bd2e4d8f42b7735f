"""Embeddings: bit-equal to diffusers' where the formula is the same, and the laws that their users rely on."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.embeddings import TimestepEmbedding, get_2d_sincos_pos_embed, get_timestep_embedding

from pellucid.core.errors import PellucidError
from pellucid.models.embeddings import ACTIVATIONS, LabelEmbedding, TimeMLP, sine_positions, sinusoid

CPU = torch.device("cpu")


@pytest.mark.parametrize("width", [4, 7, 256, 320])
@pytest.mark.parametrize(
    ("flip", "shift", "scale", "period"), [(True, 0, 1, 10000), (True, 1, 1, 10000), (False, 1, 1000, 500)]
)
def test_sinusoid_is_diffusers_bit_by_bit(width: int, flip: bool, shift: int, scale: int, period: int) -> None:
    time = torch.tensor([0, 1, 3.25, 500.5, 999], dtype=torch.float64)
    expected = get_timestep_embedding(time, width, flip, shift, scale, period)
    ours = sinusoid(time, width, flip=flip, shift=shift, scale=scale, max_period=period)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, expected)


def test_sinusoid_of_integers_and_of_any_shape() -> None:
    sizes = torch.tensor([[512, 768, 1], [0, 3, 999]])
    waves = sinusoid(sizes, 8)
    assert waves.shape == (2, 3, 8)
    assert torch.equal(waves.flatten(0, 1), sinusoid(sizes.flatten().float(), 8))
    assert sinusoid(torch.tensor(3.0), 8).shape == (8,)


def test_sinusoid_lies_on_circles() -> None:
    cos, sin = sinusoid(torch.rand(50, generator=torch.Generator().manual_seed(0)) * 1000, 64).chunk(2, dim=1)
    assert torch.allclose(cos**2 + sin**2, torch.ones(()), atol=1e-6)  # a float32 sine is good to 1e-7


@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
@pytest.mark.parametrize(("out", "cond"), [(None, None), (5, 3)])
def test_time_mlp_is_diffusers(act: str, out: int | None, cond: int | None) -> None:
    torch.manual_seed(0)
    theirs = TimestepEmbedding(4, 6, act_fn=act, out_dim=out, cond_proj_dim=cond)
    ours = TimeMLP(4, 6, act=act, out_width=out, cond_width=cond)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4)
    condition = torch.randn(2, cond) if cond else None
    assert torch.equal(ours(x, condition), theirs(x, condition))
    assert torch.equal(ours(x), theirs(x))


def test_time_mlp_refuses_what_it_cannot_do() -> None:
    with pytest.raises(PellucidError, match=r"activation must be one of .*; got 'sillu'. Nearest: silu"):
        TimeMLP(4, 6, act="sillu")
    with pytest.raises(PellucidError, match="no cond_proj"):
        TimeMLP(4, 6)(torch.zeros(1, 4), torch.zeros(1, 3))


def test_labels_have_a_row_each_and_one_for_none() -> None:
    embedding = LabelEmbedding(3, 4)
    assert torch.equal(embedding(torch.tensor([3, 0])), embedding.embedding_table.weight[[3, 0]])


@pytest.mark.parametrize(("grid", "base", "scale"), [((8, 8), 8, 1), ((3, 7), 8, 2), ((16, 5), 8, 1.5), ((1, 1), 4, 1)])
def test_positions_are_diffusers_bit_by_bit(grid: tuple[int, int], base: int, scale: float) -> None:
    expected = get_2d_sincos_pos_embed(24, grid, base_size=base, interpolation_scale=scale).float()
    assert torch.equal(sine_positions(24, *grid, base=base, scale=scale, device=CPU), expected)


def test_positions_turn_over_with_the_image() -> None:
    tall = sine_positions(16, 5, 3, base=4, scale=1, device=CPU).unflatten(0, (5, 3))
    wide = sine_positions(16, 3, 5, base=4, scale=1, device=CPU).unflatten(0, (3, 5))
    assert torch.equal(tall.transpose(0, 1), wide.roll(8, dims=-1))  # the halves of rows and of columns change places
