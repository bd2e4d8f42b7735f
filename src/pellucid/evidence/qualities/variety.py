"""Diversity: how far the images of one prompt are from each other."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.qualities.given import AT_ONCE, checked, unit

SIDE = 32  # images are compared at this size: what is finer is grain, not another image


def diversity(given: Tensor, groups: Sequence[Hashable] | None = None) -> Tensor:
    """(N,): the mean distance of each to the others of its group; the mean over a group is that over all its pairs.

    Of images (N, 3, H, W) it is the root of the mean square of their difference at 32 × 32; of features (N, D) it is
    Euclidean. `groups` names the prompt of each; without it all are of one. Every group needs two.

    Kept still by: whatever keeps distances, such as brightness, and the order within a group. Contrast scales it.
    """
    rows = features(given)
    names = [0] * len(rows) if groups is None else list(groups)
    if len(names) != len(rows):
        raise PellucidError(rule("groups", f"one for each of {len(rows)} images", len(names)), "qualities")
    members: dict[Hashable, list[int]] = {}
    for i, name in enumerate(names):
        members.setdefault(name, []).append(i)
    found = torch.zeros(len(rows), dtype=torch.float64)
    for name, own in members.items():
        if len(own) < 2:
            raise PellucidError(rule(f"images of {name!r}", "at least two", len(own)), "qualities")
        apart = torch.cdist(rows[own], rows[own], compute_mode="donot_use_mm_for_euclid_dist")
        found[own] = apart.sum(1) / (len(own) - 1)
    return found


def features(given: Tensor) -> Tensor:
    """(N, D) float64: features as they are, or images such that distances are roots of mean squares."""
    if isinstance(given, Tensor) and given.ndim == 2:
        if not given.is_floating_point() or not torch.isfinite(given).all():
            raise PellucidError(rule("features", "finite floats", str(given.dtype)), "qualities")
        return given.double().cpu()
    known = checked(given)
    size = min(SIDE, known.shape[2]), min(SIDE, known.shape[3])
    some = max(1, AT_ONCE // (known.shape[2] * known.shape[3]))
    parts = [F.adaptive_avg_pool2d(unit(part), size).flatten(1).cpu() for part in known.split(some)]
    small = torch.cat(parts).double()
    return small / math.sqrt(small.shape[1])
