"""Lab 10: where the bytes are. Fill in the four functions, then: pellucid lab 10 --check THIS_FILE"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def weight_bytes(network: nn.Module) -> int:
    """The bytes of a network's parameters. A parameter that two layers share lies in memory once."""
    raise NotImplementedError


def attention_bytes(side: int, batch: int, heads: int, bytes_a_number: int) -> int:
    """The bytes of one map of self-attention over the latents of an image of `side` × `side` pixels.

    A latent is 8 × 8 pixels. Each head of each image has a row and a column for every latent.
    """
    raise NotImplementedError


def peak(events: Sequence[tuple[str, int]], weights: int) -> int:
    """The most bytes that live at any moment.

    `events` are in order: ("make", bytes) when a tensor begins to live, ("drop", bytes) when one dies.
    """
    raise NotImplementedError


def best_saving(stages: dict[str, int], savings: dict[str, dict[str, int]]) -> str:
    """Which saving lowers the peak of a run most.

    `stages`: the peak of each stage, without any saving. `savings`: for each saving, the peaks of the stages that it
    changes. The stages of a run come one after the other.
    """
    raise NotImplementedError
