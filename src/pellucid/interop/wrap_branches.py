"""From a wrapped pipeline's steps to named predictions: which of its network's outputs is cond and which uncond.

Nothing is assumed of the family. A pipeline asks its network with and without the prompt, in one batch or in two calls,
maybe turns the sign or drops channels, and mixes the two. All of that shows in one step: the outputs and the mixture
are known, so the order, the sign and the scale are those that give the mixture. If none does, we say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pellucid.core.errors import PellucidError
from pellucid.interop.wrap import Conversation
from pellucid.interop.wrap_proxies import Branch, Call, Reply, tensor_of

# How far the mixture may be from the formula, relative: the pipeline works in its own precision.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_COARSE = 0.1
_CLEAR, _NEAR = 4.0, 1e-6  # a mixing differs from the best if it is this much worse


@dataclass(frozen=True)
class Mixing:
    """How a pipeline makes its prediction: `uncond + scale·(cond − uncond)`, times `sign`; `plain`: no more than that.

    `index` is the place of cond: among the two halves of one call's batch, or among two calls. `sure`: the two were
    far enough apart to tell.
    """

    calls: int
    predictions: int
    index: int = 0
    sign: int = 1
    scale: float = 1.0
    plain: bool = True
    sure: bool = True


class PeerNetwork:
    """A wrapped pipeline's network as guidance calls it: network(x, time, which) → predictions, uncond first.

    `which` has one number per image: 1 with the prompt, 0 without. The pipeline itself passes the time.
    """

    def __init__(self, talk: Conversation, images: int, scales: Sequence[float], mixing: Mixing | None = None) -> None:
        self.talk, self.images, self.scales, self.mixing = talk, images, scales, mixing
        self.reply: Reply | None = None

    def hear(self, x: Tensor, only: Branch | None = None) -> Reply:
        """One step of the pipeline, which also shows how the pipeline mixes, until that is sure."""
        self.reply = reply = self.talk.ask(x, only)
        if only is None and (self.mixing is None or not self.mixing.sure):
            found = recognise(reply, x, self.scales)
            if self.mixing is None or (found is not None and found.sure and found.calls == self.mixing.calls):
                self.mixing = found
        return reply

    def __call__(self, x: Tensor, time: Any, *, which: Tensor, skipped: tuple[Any, ...] = ()) -> Tensor:
        if skipped:
            return self.again(self.talk.network, x, skip_layers=list(skipped))
        x, both, mixing = x[: self.images], len(which) > self.images, self.mixing
        if not both and mixing is not None and mixing.sure and mixing.predictions == 2:
            reply = self.hear(x, Branch(mixing.index, mixing.calls, self.images))
            return self.read(reply.calls[mixing.index if mixing.calls == 2 else 0].out, x)
        reply = self.hear(x)
        if not both and len(_outputs(reply.calls, self.images)) == 1:
            return reply.mixed.to(x.dtype)
        pair = self.pair(reply, x)
        if pair is None:
            raise self.refusal()
        return torch.cat([pair[1], pair[0]]) if both else pair[0]

    def pair(self, reply: Reply, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """cond and uncond of a whole step; None where they are not known."""
        mixing, found = self.mixing, _outputs(reply.calls, self.images)
        if mixing is None or mixing.predictions != 2 or len(found) != 2:
            return None
        return self.read(found[mixing.index], x), self.read(found[1 - mixing.index], x)

    def read(self, out: Tensor, x: Tensor) -> Tensor:
        assert self.mixing is not None
        found = _shaped(out, x)
        assert found is not None
        return found * self.mixing.sign if self.mixing.sign != 1 else found

    def again(self, network: Any, x: Tensor, **more: Any) -> Tensor:
        """What another network, or this one with `more` inputs, predicts from the cond inputs of this step."""
        mixing, reply = self.mixing, self.reply
        if mixing is None or reply is None:
            raise self.refusal()
        call = reply.calls[mixing.index if mixing.calls == 2 else 0]
        args, kwargs = call.args, call.kwargs
        if mixing.predictions == 2 and len(call.out) == 2 * self.images:
            args, kwargs = Branch(mixing.index, mixing.calls, self.images).half(call)
        return self.read(tensor_of(network(*args, **kwargs, **more)), x[: self.images])

    def refusal(self) -> PellucidError:
        kind = self.talk.peer.kind
        if self.mixing is None:
            return PellucidError(
                f"guidance must be left to {kind}: what it does with its network's outputs is not recognised as a "
                "mixture of a prediction with the prompt and one without. Leave guidance out.",
                "wrap-guidance",
            )
        return PellucidError(
            f"guidance must be 1 for {kind}: it makes no prediction without the prompt here. Its network takes the "
            "scale as an input, or has none.",
            "wrap-guidance",
        )


def _outputs(calls: Sequence[Call], images: int) -> list[Tensor]:
    """The network's predictions in a step, each for all images."""
    return [half for call in calls for half in torch.split(call.out, images)]


def _shaped(out: Tensor, x: Tensor) -> Tensor | None:
    """An output in the form and precision of x: without the channels of a learned variance, without sides of 1."""
    if out.ndim == x.ndim and out.ndim > 1 and out.shape[1] == 2 * x.shape[1]:
        out = out[:, : x.shape[1]]
    return out.reshape(x.shape).to(x.dtype) if out.numel() == x.numel() else None


def recognise(reply: Reply, x: Tensor, scales: Sequence[float]) -> Mixing | None:
    """The mixing that gives the pipeline's prediction; `scales` are those that it may have used."""
    shapes = [_shaped(out, x) for out in _outputs(reply.calls, len(x))]
    found = [out for out in shapes if out is not None]
    whole = all(len(call.out) % len(x) == 0 for call in reply.calls)
    mixed = reply.mixed.to(x.dtype)
    if not whole or len(shapes) > 2 or len(found) < len(shapes) or mixed.shape != x.shape:
        return None
    allowed = _TOLERANCE.get(reply.mixed.dtype, _COARSE)
    if reply.calls[0].out.dtype not in _TOLERANCE:
        allowed = _COARSE
    base = Mixing(len(reply.calls), len(found))
    tried = [(_apart(mixing, found, mixed), mixing) for mixing in _mixings(base, scales)]
    least = min(error for error, _ in tried)
    if not least <= allowed:
        return None
    # the first that is as good as the best; then whether every other order is worse
    near = _CLEAR * least + _NEAR
    best = next(mixing for error, mixing in tried if error <= near)
    return replace(best, sure=all(error > near for error, mixing in tried if mixing.index != best.index))


def _mixings(base: Mixing, scales: Sequence[float]) -> list[Mixing]:
    """What pipelines do: either order, either sign; a scale that counts from 1, or from 0; with the norm put back."""
    if base.predictions == 1:
        return [replace(base, sign=sign) for sign in (1, -1)]
    orders = (1, 0) if base.calls == 1 else (0, 1)  # the usual one first: it wins where both fit
    every = sorted({s + more for s in scales for more in (0.0, 1.0)})
    return [
        replace(base, index=index, sign=sign, scale=scale, plain=plain)
        for plain in (True, False)
        for index in orders
        for sign in (1, -1)
        for scale in every
    ]


def _apart(mixing: Mixing, found: Sequence[Tensor], mixed: Tensor) -> float:
    """The largest difference between the mixture by this rule and the pipeline's own, relative."""
    cond, uncond = found[mixing.index], found[1 - mixing.index] if mixing.predictions == 2 else found[0]
    guess = uncond + mixing.scale * (cond - uncond) if mixing.predictions == 2 else cond
    if not mixing.plain:  # the norm of cond along the last side (Qwen-Image, Lumina 2)
        size = torch.linalg.vector_norm(guess, dim=-1, keepdim=True).clamp_min(torch.finfo(guess.dtype).tiny)
        guess = guess * (torch.linalg.vector_norm(cond, dim=-1, keepdim=True) / size)
    return float((mixing.sign * guess - mixed).abs().max() / mixed.abs().max().clamp_min(1e-30))
