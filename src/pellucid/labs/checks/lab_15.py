"""What an answer to lab 15 must do."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from pellucid.core import oracle
from pellucid.core.compile import compile_plan
from pellucid.core.loop import Job, run_batch
from pellucid.core.plan import REGISTERS, Plan
from pellucid.labs.answers import Check, Mistake
from pellucid.labs.checks.tensors import diagnosis, off, tensor

STEPS = 6
CLOSE = 1e-6
SHORT = 10
PATIENCE = 300  # steps that any request may wait, with the lists below
SECONDS = {1: 0.010, 2: 0.014, 4: 0.024, 8: 0.060}  # four have the most images per second


class Request(NamedTuple):
    """As in the starter."""

    arrived: int
    calls: int


# --- A step of several plans, and what it costs ----------------------------------------------------------------------


def weights_of(plan: Plan, index: int) -> dict[str, float]:
    return {REGISTERS[register]: weight for register, weight in plan.rows[index].x}


def check_step(answer: ModuleType) -> None:
    """Our batch, with the answer in the place of the weighted sum; the registers of images whose plan has no p1 too."""
    density = oracle.smooth()
    plans = [compile_plan(name, schedule="linear", steps=STEPS) for name in ("ddim", "dpmpp_2m", "euler")]
    noise = torch.randn(len(plans), 4, generator=torch.Generator().manual_seed(15), dtype=torch.float64)
    x = torch.stack([one * plan.initial_scale for one, plan in zip(noise, plans, strict=True)])
    wanted = run_batch([Job(plan, x=one) for plan, one in zip(plans, x, strict=True)], density, dtype=torch.float64)
    p0 = torch.zeros_like(x)
    for index in range(STEPS):
        p1, p0 = p0, torch.cat([density(one[None], plan.rows[index].level) for one, plan in zip(x, plans, strict=True)])
        registers, weights = {"x": x, "p0": p0, "p1": p1}, [weights_of(plan, index) for plan in plans]
        right = summed(registers, weights)
        got = tensor(answer.mixed_step(dict(registers), weights), right, "the next x of 3 images")
        if not off(got, right, "the next x") < CLOSE:
            slips = {
                "every image has the weights of the first": summed(registers, [weights[0]] * len(plans)),
                "every image has the weights of the last": summed(registers, [weights[-1]] * len(plans)),
                "p1 is left out": summed(registers, [{k: w for k, w in own.items() if k != "p1"} for own in weights]),
            }
            otherwise = "each image is a sum with the weights of its own row"
            hint = diagnosis(slips, partial(torch.allclose, got), otherwise, "{}")
            raise Mistake(f"the images of a batch must be right to {CLOSE:g} in step {index}; they are not: {hint}.")
        x = got
    if not off(x, wanted, "x at the end") < CLOSE:
        raise Mistake(f"after {STEPS} steps the images must be those of our batch, to {CLOSE:g}; got others.")


def summed(registers: Mapping[str, Tensor], weights: Sequence[Mapping[str, float]]) -> Tensor:
    """The sum of each image over its own weights."""
    columns = {name: [own.get(name, 0.0) for own in weights] for name in registers}
    parts = [registers[name] * torch.tensor(column, dtype=torch.float64)[:, None] for name, column in columns.items()]
    return torch.stack(parts).sum(0)


def check_latency(answer: ModuleType) -> None:
    for wait, sizes in ((0.25, (2, 1, 1, 8, 8, 4)), (0.0, (8,))):
        steps = [SECONDS[size] for size in sizes]
        wanted, got = wait + sum(steps), answer.latency(wait, list(sizes), dict(SECONDS))
        if same(got, wanted):
            continue
        slips = {
            "the wait is left out": sum(steps),
            "a step is not shared out: each of its images waits for all of it": wait
            + sum(step / size for step, size in zip(steps, sizes, strict=True)),
            "the batch changes its size on the way": wait + len(sizes) * steps[0],
            "every step is counted as if the image were alone": wait + len(sizes) * SECONDS[1],
        }
        hint = diagnosis(slips, partial(same, got), "wait, and the seconds of each step", "{}")
        raise Mistake(
            f"after a wait of {wait} s, steps of {list(sizes)} images must take {wanted:.3f} s; got {got}: {hint}."
        )


def same(got: object, wanted: float) -> bool:
    return isinstance(got, (int, float)) and math.isclose(got, wanted, rel_tol=1e-9)


def check_capacity(answer: ModuleType) -> None:
    cases = (
        (20, 10.0, 4, "eight have fewer images per second than four: the step got slower by more"),
        (20, 0.30, 2, "the limit is on calls × seconds of a step"),
        (20, 0.20, 1, "one image alone is just within the limit"),
        (20, 0.19, 0, "nothing is within the limit"),
    )
    for calls, limit, wanted, hint in cases:
        got = answer.best_capacity(dict(SECONDS), calls, limit)
        if got != wanted:
            raise Mistake(
                f"with steps of {SECONDS} s, {calls} calls and a limit of {limit} s the best size must be {wanted}; "
                f"got {got}: {hint}."
            )


# --- Who joins next --------------------------------------------------------------------------------------------------


def joined(answer: ModuleType, requests: Sequence[Request], capacity: int, until: int) -> dict[int, int]:
    """The step at which each request joined, by its place in the list; without those that had not by step `until`."""
    coming, waiting = list(range(len(requests))), list[int]()
    running, began = dict[int, int](), dict[int, int]()  # calls that are left; the step
    for step in range(until):
        while coming and requests[coming[0]].arrived <= step:
            waiting.append(coming.pop(0))
        while (found := asked(answer, [requests[i] for i in waiting], [requests[i] for i in running], capacity)) >= 0:
            i = waiting.pop(found)
            began[i], running[i] = step, requests[i].calls
        if waiting and len(running) < capacity - 1:
            raise Mistake(
                f"while requests wait at most one place may stay empty; {len(running)} of {capacity} were taken and "
                f"{len(waiting)} waited. Is it None too early?"
            )
        running = {i: left - 1 for i, left in running.items() if left > 1}
        if not (coming or waiting):
            break
    return began


def asked(answer: ModuleType, waiting: list[Request], running: list[Request], capacity: int) -> int:
    """The place in the queue of the request that joins; -1 where none does."""
    chosen = answer.next_entry(tuple(waiting), tuple(running), capacity)
    if chosen is None:
        return -1
    if chosen not in waiting:
        raise Mistake(f"next_entry must give one of the requests that wait, or None; got {chosen!r}.")
    if len(running) >= capacity:
        raise Mistake(f"the batch has {capacity} places, and all are taken; got {chosen!r} all the same. Give None.")
    return waiting.index(chosen)


def by_arrival(requests: Sequence[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.arrived)


def check_places(answer: ModuleType) -> None:
    """Every request of mixed lists is served, never in more places than there are."""
    draw = random.Random(15)
    for capacity in (2, 3, 8):
        calls = [draw.choice((4, 6, 8, 30, 40)) for _ in range(60)]
        requests = by_arrival([Request(draw.randrange(0, 40 * 60 // capacity), n) for n in calls])
        if missing := len(requests) - len(joined(answer, requests, capacity, 8000)):
            raise Mistake(f"of 60 requests to {capacity} places all must join; {missing} never did.")


def check_short(answer: ModuleType) -> None:
    """Long requests fill the batch and its queue, and a short one comes now and then."""
    for capacity in (2, 4, 8):
        long = [Request(0, 40 + i % 3) for i in range(3 * capacity)]
        short = [Request(arrived, 4 + arrived % 5) for arrived in (3, 14, 27, 45, 60, 95)]
        requests = by_arrival([*long, *short])
        began = joined(answer, requests, capacity, 2000)
        waits = [began.get(i, 2000) - one.arrived for i, one in enumerate(requests) if one.calls <= SHORT]
        if max(waits) > SHORT:
            raise Mistake(
                f"a short request behind {len(long)} long ones must wait {SHORT} steps at most; with {capacity} places "
                f"it waited {max(waits)}. Being first in the queue does not help while long ones hold every place: "
                "keep one for short requests."
            )


def check_starving(answer: ModuleType) -> None:
    """Short requests come as fast as they can be served, for a long time, and long ones wait beside them."""
    until = 1200
    for capacity in (2, 4):
        every = 8 // capacity
        stream = [Request(step, 8) for step in range(0, until, every)]
        requests = by_arrival([*stream, Request(5, 40), Request(6, 40), Request(300, 50)])
        began = joined(answer, requests, capacity, until)
        for i, one in enumerate(requests):
            if one.arrived <= until - PATIENCE and began.get(i, math.inf) - one.arrived > PATIENCE:
                raise Mistake(
                    f"with a short request every {every} steps and {capacity} places, one of {one.calls} calls must "
                    f"still join within {PATIENCE} steps; it did not: {starved(answer, one, capacity)}."
                )


def starved(answer: ModuleType, one: Request, capacity: int) -> str:
    """Why a request does not get in: what the answer says where only short ones run and one place is free."""
    if asked(answer, [one], [Request(0, 8)] * (capacity - 1), capacity) < 0:
        return (
            "it is refused a free place although no long one runs, and so the next short one takes it. Count the long "
            "ones that run, not the places that are free"
        )
    return "others went first each time. Who has waited long must come before a short one that has just arrived"


CHECKS = [
    Check("a step of several plans", check_step),
    Check("the latency of a request", check_latency),
    Check("the best number of places", check_capacity),
    Check("who joins next: the places", check_places),
    Check("who joins next: a short one behind long ones", check_short),
    Check("who joins next: nobody starves", check_starving),
]
