"""The step batch: images that join and leave between steps, each the same as alone, whatever the others are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pellucid import (
    Cancelled,
    Clip,
    Job,
    PellucidError,
    Philox,
    StepSeen,
    TorchStream,
    compile_plan,
    denoiser,
    run_batch,
)
from pellucid.core import samplers
from pellucid.core.batch import Batch, Entry
from pellucid.core.loop import loop

SHAPE = (3, 5, 7)


def network(x: Tensor, time: Tensor) -> Tensor:
    """Treats each number by itself, with + − × ÷ only: these round alike wherever they are computed."""
    passed = time.reshape(-1, *([1] * (x.ndim - 1))) / 1000
    return x * (0.2 + 0.6 * passed) / (1.0 + x * x)


TOY = denoiser(network, "scaled_linear", "eps")


def entry(sampler: str = "euler", steps: int = 4, seeds: tuple[int, ...] = (0,), **more: Any) -> Entry:
    options = {"denoiser": TOY, "noise": Philox(seeds), "shape": SHAPE} | more
    plan = compile_plan(sampler, steps=steps)
    x = options["noise"].first(options.pop("shape"), torch.empty(0), range(len(seeds))) * plan.initial_scale
    return Entry([plan] * len(seeds), x=x, **options)


def alone(sampler: str, steps: int, seeds: tuple[int, ...]) -> Tensor:
    one = entry(sampler, steps, seeds)
    return loop(one.plans, one.denoiser, one.x, one.noise, (), (), None)


def drain(batch: Batch, wait: list[Entry] = [], rng: random.Random | None = None) -> list[Entry]:  # noqa: B006
    """Steps until all have ended; entries of `wait` join in between."""
    waiting, left = list(wait), []
    while batch.entries or waiting:
        while waiting and (rng is None or not batch.entries or rng.random() < 0.4):
            batch.join(waiting.pop(0))
        left += batch.step()
    return left


@pytest.mark.parametrize("seed", range(4))
def test_random_joins_of_every_sampler_change_no_bit(seed: int) -> None:
    rng = random.Random(seed)
    asked = []
    for k, name in enumerate(samplers.names()):
        try:
            asked.append((name, rng.randint(3, 9), tuple(range(10 * k, 10 * k + rng.randint(1, 3)))))
            compile_plan(name, steps=asked[-1][1])
        except PellucidError:  # a sampler of another schedule
            asked.pop()
    assert len(asked) > 25
    rng.shuffle(asked)
    entries = [entry(*one) for one in asked]
    drain(Batch(), entries, rng)
    for one, found in zip(asked, entries, strict=True):
        assert found.error is None
        assert torch.equal(found.result, alone(*one)), one


def test_entries_of_one_denoiser_share_its_calls() -> None:
    calls: list[int] = []
    counting = denoiser(lambda x, t: calls.append(len(x)) or network(x, t), "scaled_linear", "eps")
    batch = Batch()
    batch.join(entry(steps=4, denoiser=counting))
    batch.step()
    batch.join(entry("dpmpp_2m", 2, (1, 2), denoiser=counting))
    drain(batch)
    assert calls == [1, 3, 3, 1]


def test_entries_of_other_denoisers_do_not() -> None:
    batch, other = Batch(), denoiser(network, "scaled_linear", "eps", x0_filter=Clip(1.0))
    first, second = entry(seeds=(0,)), entry(seeds=(1,), denoiser=other)
    third = entry(seeds=(2,))
    drain(batch, [first, second, third])
    assert [torch.equal(e.result, alone("euler", 4, e.noise.seeds)) for e in (first, second, third)] == [
        True,
        False,
        True,
    ]


def test_what_an_observer_sees_is_of_its_own_entry() -> None:
    seen: list[StepSeen] = []
    batch = Batch()
    batch.join(entry(steps=5, seeds=(0, 1)))
    batch.step()
    late = entry("heun", 2, (7,), observers=[seen.append])
    batch.join(late)
    drain(batch)
    assert [step.index for step in seen] == [0, 1, 2]
    assert all(len(step.x) == len(step.x0) == len(step.x_next) == 1 and step.images == (0,) for step in seen)
    assert torch.equal(seen[-1].x_next, late.result)
    assert [step.row for step in seen] == list(late.plans[0].rows)


def test_a_constraint_holds_its_own_images_alone() -> None:
    held = entry(seeds=(1,), constraints=[lambda step: torch.full_like(step.x_next, 0.25)])
    free = entry(seeds=(0, 2))
    drain(Batch(), [free, held])
    assert torch.equal(held.result, torch.full_like(held.result, 0.25))
    assert torch.equal(free.result, alone("euler", 4, (0, 2)))


def boom(step: StepSeen) -> Tensor:
    if step.index == 1:
        raise ValueError("boom")
    return step.x_next


@pytest.mark.parametrize(
    ("failing", "kind"),
    [
        (lambda: entry(observers=[boom]), ValueError),
        (lambda: entry(constraints=[boom]), ValueError),
        (lambda: entry(denoiser=lambda x, level, time: 1 / 0), ZeroDivisionError),
        (lambda: entry(denoiser=lambda x, level, time: x[:, :1]), PellucidError),
        (lambda: entry(cancelled=lambda: True), Cancelled),
    ],
)
def test_what_fails_leaves_the_others_alone(failing: Callable[[], Entry], kind: type[Exception]) -> None:
    bad, good = failing(), entry("dpmpp_2m_sde", 5, (3, 4))
    left = drain(Batch(), [good, bad])
    assert isinstance(bad.error, kind)
    assert left == [bad, good]
    assert torch.equal(good.result, alone("dpmpp_2m_sde", 5, (3, 4)))


def test_leaving_early_frees_the_place() -> None:
    batch, first, second = Batch(capacity=3), entry(seeds=(0, 1)), entry(seeds=(2,))
    batch.join(first)
    batch.join(second)
    with pytest.raises(PellucidError, match=r"images must be at most 0, which the batch has room for; got 1\."):
        batch.join(entry(seeds=(3,)))
    batch.step()
    batch.leave(first)
    assert len(batch) == 1
    assert isinstance(first.error, Cancelled)
    late = entry(seeds=(5, 6))
    batch.join(late)
    drain(batch)
    assert torch.equal(second.result, alone("euler", 4, (2,)))
    assert torch.equal(late.result, alone("euler", 4, (5, 6)))


def test_another_latent_shape_is_refused_in_one_line() -> None:
    batch = Batch()
    batch.join(entry())
    with pytest.raises(PellucidError, match=r"x must be of the shape and dtype of the batch, \(\(3, 5, 7\).*got"):
        batch.join(entry(shape=(3, 6, 7)))


def test_streams_of_torch_beside_addressed_noise() -> None:
    plans = [compile_plan(name, steps=5) for name in ("euler_a", "dpmpp_2m_sde", "ddpm")]
    jobs = [Job(plans[0], 3, noise=TorchStream(3)), Job(plans[1], 4), Job(plans[2], 5, noise=TorchStream(5))]
    together = run_batch(jobs, TOY, shape=SHAPE)
    for k, (plan, kind) in enumerate(zip(plans, (TorchStream, Philox, TorchStream), strict=True)):
        one = run_batch([Job(plan, 3 + k, noise=kind(3 + k))], TOY, shape=SHAPE)
        assert torch.equal(together[k], one[0])
    assert not torch.equal(together[0], run_batch([Job(plans[0], 3)], TOY, shape=SHAPE)[0])


def test_an_entry_that_cannot_begin_leaves_the_batch_as_it_was() -> None:
    class Broken:
        def begin_run(self, run: Any) -> None:
            raise ValueError("no file")

        def mark(self, work: str) -> None: ...

        def __call__(self, seen: StepSeen) -> None: ...

    batch, first = Batch(), entry("euler", 4, (1,))
    batch.join(first)
    batch.step()
    with pytest.raises(ValueError, match="no file"):
        batch.join(entry("heun", 3, (2,), observers=[Broken()]))
    assert len(batch) == 1
    drain(batch)
    assert torch.equal(first.result, alone("euler", 4, (1,)))


def test_an_error_of_cancelled_is_its_own_entry_s() -> None:
    def broken() -> bool:
        raise OSError("no answer")

    batch, first, second = Batch(), entry("euler", 4, (1,)), entry("heun", 3, (2,), cancelled=broken)
    batch.join(first)
    batch.join(second)
    drain(batch)
    assert isinstance(second.error, OSError)
    assert torch.equal(first.result, alone("euler", 4, (1,)))
