"""Inputs of a network as trees of tensors: joined, picked and checked leaf by leaf."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from pellucid import PellucidError
from pellucid.models import inputs


class Tokens(NamedTuple):
    k: Tensor
    mask: Tensor | None


def tree(value: float, rows: int = 2) -> dict:
    leaf = torch.full((rows, 3), value)
    return {"context": leaf, "image": ((Tokens(leaf[:, :2], None),), ()), "pooled": None, "more": [leaf]}


def test_join_puts_the_second_batch_behind_the_first_in_every_leaf() -> None:
    found = inputs.join(tree(1.0), tree(2.0, rows=1))
    column = torch.tensor([1.0, 1.0, 2.0])
    assert torch.equal(found["context"], column[:, None].expand(3, 3))
    tokens = found["image"][0][0]
    assert isinstance(tokens, Tokens)
    assert torch.equal(tokens.k, column[:, None].expand(3, 2))
    assert tokens.mask is None
    assert found["image"][1] == ()
    assert found["pooled"] is None
    assert isinstance(found["more"], list)


def test_pick_takes_rows_in_the_order_asked() -> None:
    whole = inputs.join(tree(1.0), tree(2.0))
    assert inputs.pick(whole, [3, 0])["image"][0][0].k[:, 0].tolist() == [2.0, 1.0]


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, "of one form; got the keys a and the keys b"),
        ({"a": torch.ones(1)}, {"a": None}, r"inputs\.a must be tensors.*got a tensor \(1,\) and None"),
        ({"a": (torch.ones(1),)}, {"a": ()}, "got 1 parts and 0 parts"),
        ({"a": torch.ones(1, 77)}, {"a": torch.ones(1, 154)}, r"one shape .*got \(1, 154\) and \(1, 77\)"),
        ({"a": "text"}, {"a": "text"}, "got 'text' and 'text'"),
    ],
)
def test_what_cannot_be_joined_is_named(first: dict, second: dict, line: str) -> None:
    with pytest.raises(PellucidError, match=line):
        inputs.join(first, second)


def test_check_wants_a_row_an_image() -> None:
    inputs.check(tree(1.0), 2)
    with pytest.raises(PellucidError, match=r"inputs\.context must be a tensor with one row for each of 3 images"):
        inputs.check(tree(1.0), 3)
    with pytest.raises(PellucidError, match=r"inputs\.a must be a tensor with one row"):
        inputs.check({"a": torch.tensor(1.0)}, 1)
