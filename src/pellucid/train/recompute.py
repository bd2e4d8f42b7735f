"""Activations computed again in the backward pass instead of kept: less memory for a third more work."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from pellucid.core.errors import PellucidError, rule
from pellucid.models.blocks import ResnetBlock, TransformerBlock
from pellucid.models.dit_blocks import Block
from pellucid.train.adapting import Frozen

BLOCKS = (ResnetBlock, TransformerBlock, Block)


def recompute(network: nn.Module) -> int:
    """Makes every residual and transformer block forget its activations; says how many there are."""
    trees = [network, *frozen_in(network)]
    found = {id(module): module for tree in trees for module in tree.modules() if isinstance(module, BLOCKS)}
    if not found:
        raise PellucidError(rule("recompute", "for a network of residual or transformer blocks", "none"), "recompute")
    for module in found.values():
        dice = bool(getattr(module, "dropout", 0.0))  # else none are thrown, and a captured step need not read them
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=dice)
    return len(found)


def frozen_in(network: nn.Module) -> list[nn.Module]:
    """The models that adapters stand beside: not among their submodules, but gradients pass through them."""
    bases = [getattr(module, "base", None) for module in network.modules()]
    return [base.held for base in bases if isinstance(base, Frozen) and isinstance(base.held, nn.Module)]
