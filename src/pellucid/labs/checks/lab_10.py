"""What an answer to lab 10 must do."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import nn

from pellucid.labs.answers import Check, Mistake
from pellucid.models import attention
from pellucid.pipeline.tracker import Tracker

EVENTS = (("make", 5), ("make", 7), ("drop", 5), ("make", 4), ("drop", 7), ("make", 3), ("drop", 3), ("drop", 4))


class TiedLayers(nn.Module):
    """Two layers that share a weight, as embeddings and output of a language model do; a half-precision part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.small = nn.Linear(8, 4).half()
        self.register_buffer("steps", torch.zeros(100))


def check_weights(answer: ModuleType) -> None:
    network = TiedLayers()
    wanted = (64 + 8 + 8) * 4 + (32 + 4) * 2
    got = answer.weight_bytes(network)
    if got != wanted:
        slips = {
            wanted + 64 * 4: "the shared weight was counted twice",
            wanted + 400: "buffers are not parameters",
            (64 + 8 + 8 + 36) * 4: "a float16 number has two bytes",
            64 + 8 + 8 + 36: "these are numbers, and not bytes",
        }
        hint = slips.get(got, "numbers × bytes of each parameter's own dtype")
        raise Mistake(f"weight_bytes must be {wanted}; got {got}: {hint}.")


def check_attention(answer: ModuleType) -> None:
    for side, batch, heads, size in ((64, 2, 4, 4), (128, 1, 5, 2)):
        length = (side // 8) ** 2
        q = torch.zeros(batch, heads, length, 2)
        tracker = Tracker(["cpu"])
        with tracker:
            torch.softmax(q @ q.mT, dim=-1)
        wanted = batch * heads * length * length * size
        assert tracker.peak.total >= wanted * 4 // size  # the real thing holds one map or more
        got = answer.attention_bytes(side, batch, heads, size)
        if got != wanted:
            slips = {
                batch * heads * side * side * size: "a row for every *latent*, and a column too: (side / 8)² squared",
                batch * heads * length * size: "the map is a square: length × length",
                batch * heads * side**4 * size: "attention is over latents, not over pixels",
                length * length * size: "every image and every head has a map of its own",
            }
            hint = slips.get(got, "batch × heads × length² × bytes, length = (side / 8)²")
            raise Mistake(
                f"a map at {side} pixels, batch {batch}, {heads} heads must have {wanted} bytes; got {got}: {hint}."
            )


def check_peak(answer: ModuleType) -> None:
    wanted = 10 + 12
    got = answer.peak(EVENTS, 10)
    if got != wanted:
        slips = {
            10 + 19: "what died is counted as living",
            12: "weights are there all the time",
            10 + 7: "that is the largest tensor, not the fullest moment",
            10: "that is the end of the run: by then all have died",
        }
        raise Mistake(
            f"the peak must be {wanted}; got {got}: {slips.get(got, 'follow the sum, and keep its largest value')}."
        )
    if answer.peak((), 3) != 3:
        raise Mistake("without any event the peak must be the weights, 3; something else came.")


def check_saving(answer: ModuleType) -> None:
    stages = {"text": 20, "denoise": 60, "decode": 100}
    savings = {
        "slicing": {"decode": 70},
        "lean attention": {"denoise": 25},
        "offload": {"text": 5, "denoise": 45, "decode": 80},
    }
    got = answer.best_saving(stages, savings)
    if got != "slicing":
        hint = {
            "lean attention": "a stage that does not own the peak may shrink as it likes",
            "offload": "stages come one after the other: it is the largest that counts, not their sum",
        }.get(got, "apply each saving, then take the largest stage")
        raise Mistake(f"of {', '.join(savings)} slicing is best, with a peak of 70; got {got!r}: {hint}.")
    if answer.best_saving(stages, {"slicing": {"decode": 50}, "both": {"decode": 58, "denoise": 57}}) != "both":
        raise Mistake(
            "when slicing takes decode to 50, denoise owns the peak with 60: what lowers both to 58 is better."
        )


def check_kernels(answer: ModuleType) -> None:
    side, heads = 128, 2
    length = (side // 8) ** 2
    q = torch.zeros(1, heads, length, 8)
    made = {}
    for kernel in ("flash", "math"):
        tracker = Tracker(["cpu"])
        with torch.no_grad(), attention.backend(kernel), tracker:
            nn.functional.scaled_dot_product_attention(q, q, q)
        made[kernel] = tracker.peak.total
    claimed = answer.attention_bytes(side, 1, heads, 4)
    if not made["flash"] < claimed <= made["math"]:
        raise Mistake(
            f"a fused kernel held {made['flash']} bytes and the plain one {made['math']}, of which a map must explain "
            f"most; attention_bytes says {claimed}."
        )


CHECKS = [
    Check("bytes of weights", check_weights),
    Check("bytes of a map of attention", check_attention),
    Check("the map, in a real kernel", check_kernels),
    Check("the peak of a run", check_peak),
    Check("which saving helps", check_saving),
]
