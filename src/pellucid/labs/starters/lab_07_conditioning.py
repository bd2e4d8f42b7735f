"""Lab 07: conditioning in UNet and DiT. Fill in the four functions, then run `pellucid lab 07 --check FILE`."""

from torch import Tensor


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """The weights of attention, (batch, heads, places, tokens).

    q is (batch, heads, places, d), k is (batch, heads, tokens, d).
    """
    raise NotImplementedError


def word_map(weights: Tensor, token: int, side: int) -> Tensor:
    """Where a token acts, (batch, side, side): the mean over heads of its weights; places are counted row by row."""
    raise NotImplementedError


def modulated(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """adaLN: a layer norm over the last axis without weights of its own, then scale and shift from the condition.

    x is (batch, tokens, width), shift and scale are (batch, width). A scale of 0 leaves the normed x as it is.
    """
    raise NotImplementedError


def num_tokens(height: int, width: int, factor: int, patch: int) -> int:
    """Tokens of a DiT for an image in pixels: `factor` pixels a latent, `patch` latents a patch, along one side."""
    raise NotImplementedError
