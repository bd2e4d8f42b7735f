"""What an answer to lab 14 must do."""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from pellucid.core import oracle
from pellucid.core import schedule as schedules
from pellucid.evidence.tune import teacher
from pellucid.evidence.tune.model import Pairs, oracle_model
from pellucid.evidence.tune.table import Start
from pellucid.evidence.tune.teacher import distance, ends
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import diagnosis, tensor


def check_sets(answer: ModuleType) -> None:
    sets = [list(part) for part in answer.divided(100, 8, 4, 6)]
    if [len(part) for part in sets] != [8, 4, 6]:
        raise Mistake(f"the three sets must have 8, 4 and 6 seeds; got {[len(part) for part in sets]}.")
    if len({seed for part in sets for seed in part}) != 18:
        raise Mistake("a seed is in two sets: what was tuned on cannot judge.")
    if [seed for part in sets for seed in part] != list(range(100, 118)):
        raise Mistake(f"seeds must count up from 100 to 117, first those to tune on; got {sets}.")


def ended() -> tuple[Tensor, Tensor]:
    """Where a plan of 6 calls and the teacher end, on 64 seeds (N, D)."""
    subject = oracle_model("sharp", oracle.sharp(), schedules.make("linear"))
    truth = teacher.teach(subject, Pairs(tuple(range(64))), 40, 64, lambda count: None)
    plan = Start.parse("dpmpp_2m:karras").plan(subject.schedule, subject.target, 6)
    return ends(plan, subject, truth, 64), truth.x0


def check_distances(answer: ModuleType) -> None:
    for student, truth in (ended(), (torch.rand(3, 2, 4, 4), torch.rand(3, 2, 4, 4))):
        wanted = distance(student, truth)
        got = tensor(answer.distances(student, truth), wanted, "distances, one number per pair,")
        if torch.allclose(got, wanted, rtol=1e-5):
            continue
        squared = torch.allclose(got, wanted.square(), rtol=1e-4)
        hint = "the root is missing" if squared else "the mean over all axes but the first, then the root"
        raise Mistake(f"the first distance must be {float(wanted[0]):.4f}; got {float(got[0]):.4f}: {hint}.")


def check_objective(answer: ModuleType) -> None:
    errors = torch.tensor([0.01, 0.04, 1.0], dtype=torch.float64, requires_grad=True)
    got = answer.objective(errors)
    if not isinstance(got, Tensor) or got.grad_fn is None:
        raise Mistake(
            "objective must give a tensor with a gradient; got one that has none, and nothing could be descended."
        )
    if not torch.isclose(got, errors.sqrt().mean(), rtol=1e-5):
        slips = {"the mean of the errors, of which one pair in another mode owns all": errors.mean(),
                 "the root of the mean: take the root first": errors.mean().sqrt()}  # fmt: skip
        hint = diagnosis(slips, partial(torch.isclose, got), "mean of √error")
        raise Mistake(
            f"of 0.01, 0.04 and 1 it must be {float(errors.sqrt().mean()):.4f}; got {float(got.detach()):.4f}: {hint}."
        )
    exact = torch.tensor([0.0, 0.04], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(answer.objective(exact), exact)
    if not bool(slope.isfinite().all()):
        raise Mistake(f"a pair without error must have a finite slope; got {slope.tolist()}. Put 1e-12 under the root.")


def check_judgement(answer: ModuleType) -> None:
    generator = torch.Generator().manual_seed(14)
    hard = torch.rand(400, generator=generator, dtype=torch.float64) ** 8  # a heavy tail that both plans share
    little = 0.01 + 0.002 * torch.randn(400, generator=generator, dtype=torch.float64)
    if not answer.is_better(hard, hard + little):
        raise Mistake(
            "400 pairs that are each better by about 0.01 are better beyond chance; got no. Compare pair by pair: both "
            "plans find the same seeds hard, and that cancels in the difference."
        )
    if answer.is_better(hard + little, hard):
        raise Mistake("a tuned plan whose errors are larger is not better; got yes. Which way round is the difference?")
    luck = torch.zeros(400, dtype=torch.float64)
    luck[0] = -4.0  # one seed of 400 that ended elsewhere makes the whole of the gain
    if answer.is_better(4 + luck, 4 + 0 * luck):
        raise Mistake(
            "one seed of 400 makes the whole gain: the mean is 1 standard error below 0, which is chance; got yes."
        )


CHECKS = [
    Check("three sets of seeds", check_sets),
    Check("the error of a pair", check_distances),
    Check("what is descended", check_objective),
    Check("better beyond chance", check_judgement),
]
