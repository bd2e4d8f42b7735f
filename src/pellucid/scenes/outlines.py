"""Outlines in a finished image, and how well they follow exact ones: the measure of a ControlNet."""

from __future__ import annotations

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.scenes.labels import SIDE, grown, labelled, prepared

CHUNK = 8
CUT = 0.5  # an exact outline runs through pixels that it covers by half


def outlines(images: Tensor) -> Tensor:
    """(N, 128, 128) bool: where labels change to the right or downwards. Textures have no outline."""
    found = []
    with torch.no_grad():
        for part in prepared(images).split(CHUNK):
            label = labelled(part).label.clamp(min=0)
            edge = torch.zeros_like(label, dtype=torch.bool)
            edge[:, :, :-1] |= label[:, :, :-1] != label[:, :, 1:]
            edge[:, :-1, :] |= label[:, :-1, :] != label[:, 1:, :]
            found.append(edge)
    return torch.cat(found)


def edge_f1(images: Tensor, edges: Tensor) -> Tensor:
    """(N,): F1 of the outlines of images (N, 3, H, W) against exact edges (N, 1, 128, 128) in [0, 1].

    A pixel counts as met when the other map has one within one pixel, diagonals included.
    """
    edges = edges[None] if edges.ndim == 3 else edges
    seen = outlines(images)
    if edges.shape != (len(seen), 1, SIDE, SIDE):
        raise PellucidError(rule("edges", f"({len(seen)}, 1, {SIDE}, {SIDE})", tuple(edges.shape)), "scenes-edges")
    exact = edges[:, 0].to(seen.device) >= CUT
    hit = (seen & grown(exact)).sum((1, 2)), (exact & grown(seen)).sum((1, 2))
    precision = hit[0] / seen.sum((1, 2)).clamp(min=1)
    recall = hit[1] / exact.sum((1, 2)).clamp(min=1)
    return 2 * precision * recall / (precision + recall).clamp(min=1e-9)
