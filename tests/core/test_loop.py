"""The loop: one image whatever the batch, mixed batches, observers, constraints, cancellation, dtypes and cost."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import subprocess
import sys
import time
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pellucid import (
    Brownian,
    Cancelled,
    Clip,
    DynamicThreshold,
    Grid,
    Job,
    Level,
    PellucidError,
    PellucidWarning,
    Philox,
    Plan,
    Prediction,
    StepSeen,
    compile_plan,
    denoiser,
    oracle,
    run,
    run_batch,
    schedules,
)
from pellucid.core import samplers
from pellucid.core.batch import RunSeen
from pellucid.core.plan import P0, P1, X, row

SAMPLERS = samplers.names()
SHAPE = (3, 5, 7)  # 105 numbers: no multiple of a vector register, so that tails of kernels are tested too


def network(x: Tensor, time: Tensor) -> Tensor:
    """A toy that treats each number by itself, with + − × ÷ only: these round alike wherever they are computed."""
    told = time.reshape(-1, *([1] * (x.ndim - 1))) / 1000
    return x * (0.2 + 0.6 * told) / (1.0 + x * x)


TOY = denoiser(network, "scaled_linear", "eps")


def seen_by(plan, **kwargs) -> list[StepSeen]:
    steps: list[StepSeen] = []
    run(plan, TOY, shape=SHAPE, observers=[steps.append], **kwargs)
    return steps


# --- one image, whatever the batch -----------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_same_seed_gives_the_same_image_at_batch_1_3_and_64(sampler: str) -> None:
    plan = compile_plan(sampler, steps=4)
    alone = run(plan, TOY, shape=SHAPE, seeds=7)[0]
    assert torch.isfinite(alone).all()
    assert torch.equal(run(plan, TOY, shape=SHAPE, seeds=[5, 6, 7])[2], alone)
    assert torch.equal(run(plan, TOY, shape=SHAPE, seeds=[7, 5, 6])[0], alone)
    many = [*range(100, 131), 7, *range(131, 163)]
    assert torch.equal(run(plan, TOY, shape=SHAPE, seeds=many)[31], alone)
    assert torch.equal(run(plan, TOY, shape=SHAPE, seeds=many[::-1])[32], alone)


@pytest.mark.parametrize("sampler", [s for s in SAMPLERS if compile_plan(s, steps=4).stochastic])
def test_other_seeds_give_other_images(sampler: str) -> None:
    x = torch.ones(2, *SHAPE)
    a, b = run(compile_plan(sampler, steps=4), TOY, x, seeds=[1, 2])
    assert not torch.equal(a, b)  # from the same x: the noise of the steps differs too


def test_seeds_count_up_from_one_number() -> None:
    plan = compile_plan("ddpm", steps=3)
    x = torch.ones(3, 4)
    assert torch.equal(run(plan, TOY, x, seeds=5), run(plan, TOY, x, seeds=[5, 6, 7]))


# --- mixed batches ---------------------------------------------------------------------------------------------


def mixed_jobs() -> list[Job]:
    jobs = [Job(compile_plan(name, steps=3 + i % 4), seed=i) for i, name in enumerate(SAMPLERS)]
    jobs += [
        Job(compile_plan("dpmpp_2m", steps=5, grid="karras"), seed=50),
        Job(compile_plan("unipc", steps=4, grid=Grid(start=600.0)), seed=51),
        Job(compile_plan("euler_a", steps=4, grid=Grid("karras", start=300.0)), seed=52),
        Job(compile_plan("heun", steps=1), seed=53),
        Job(compile_plan("ddim", steps=20, skip=14), seed=54),
        Job(compile_plan("euler", steps=3, s_churn=1.0), seed=55),
    ]
    return jobs


def test_a_batch_of_all_samplers_equals_each_alone() -> None:
    """Every sampler, other step counts, grids and start levels, in one batch: to the last bit."""
    jobs = mixed_jobs()
    together = run_batch(jobs, TOY, shape=SHAPE)
    for job, found in zip(jobs, together, strict=True):
        assert torch.equal(found, run(job.plan, TOY, shape=SHAPE, seeds=job.seed)[0]), job.plan.name


@given(
    picks=st.lists(st.tuples(st.sampled_from(SAMPLERS), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=6)
)
@settings(max_examples=30, deadline=None)
def test_any_batch_equals_each_alone(picks: list) -> None:
    jobs = [Job(compile_plan(name, steps=steps), seed) for name, steps, seed in picks]
    together = run_batch(jobs, TOY, shape=(5,))
    for job, found in zip(jobs, together, strict=True):
        assert torch.equal(found, run(job.plan, TOY, shape=(5,), seeds=job.seed)[0])


def test_jobs_may_bring_their_own_x() -> None:
    a, b = compile_plan("ddim", steps=3), compile_plan("heun", steps=2)
    x, y = torch.full((5,), 2.0), torch.full((5,), -1.0)
    together = run_batch([Job(a, 1, x), Job(b, 2, y)], TOY)
    assert torch.equal(together[0], run(a, TOY, x[None], seeds=1)[0])
    assert torch.equal(together[1], run(b, TOY, y[None], seeds=2)[0])


def test_images_leave_the_batch_when_they_are_done() -> None:
    plans = [compile_plan("euler", steps=n) for n in (2, 5, 3)]
    sizes: list[tuple] = []
    run_batch([Job(p, i) for i, p in enumerate(plans)], TOY, shape=(4,), observers=[lambda s: sizes.append(s.images)])
    assert sizes == [(0, 1, 2), (0, 1, 2), (1, 2), (1,), (1,)]


def test_the_last_image_alone_is_told_one_level_again() -> None:
    """When one plan is left the batch is no longer mixed; the numbers must not notice."""
    asked: list[type] = []

    def spy(x: Tensor, level, time) -> Tensor:
        asked.append(type(level).__name__)
        return TOY(x, level, time)

    short, long = compile_plan("dpmpp_2m", steps=2), compile_plan("dpmpp_2m", steps=5)
    together = run_batch([Job(short, 1), Job(long, 2)], spy, shape=(6,))
    assert asked == ["BatchLevel", "BatchLevel", "Level", "Level", "Level"]
    assert torch.equal(together[1], run(long, TOY, shape=(6,), seeds=2)[0])


def test_equal_jobs_of_one_plan_share_its_row() -> None:
    plan = compile_plan("dpmpp_3m_sde", steps=4)
    together = run_batch([Job(plan, s) for s in (3, 1, 2)], TOY, shape=SHAPE)
    assert torch.equal(together, run(plan, TOY, shape=SHAPE, seeds=[3, 1, 2]))


def test_the_oracle_runs_in_a_mixed_batch() -> None:
    ring = oracle.ring()
    jobs = [Job(compile_plan(name, steps=6), i) for i, name in enumerate(("ddim", "dpmpp_2m", "heun", "ddpm"))]
    together = run_batch(jobs, ring, shape=(2,), dtype=torch.float64)
    for job, found in zip(jobs, together, strict=True):
        # exp and sum over components may round by batch: 1e-12 is 10⁴ roundings
        alone = run(job.plan, ring, shape=(2,), seeds=job.seed, dtype=torch.float64)[0]
        assert torch.allclose(found, alone, rtol=1e-12, atol=1e-12)


def test_a_held_prediction_does_not_enter_the_history() -> None:
    """Three calls that answer 1, 2 and 3; the second is held, so the third row finds 1 before its own 3."""
    level = Level(1.0, 1.0)
    rows = (row(1.0, level, X), row(2.0, level, X, held=True), row(3.0, level, P0 * 10.0 + P1))
    plan = Plan("by_hand", rows, "x0", level, level, "ve", 1.0)

    def answer(x: Tensor, level, time) -> Tensor:
        told = time.to(x.dtype)[:, None] if isinstance(time, Tensor) else time
        return torch.zeros_like(x) + told

    x = torch.zeros(1, 4)
    assert torch.equal(run(plan, answer, x), torch.full((1, 4), 31.0))
    other = dataclasses.replace(plan, rows=(*rows[:2], row(3.0, level, P0)))
    mixed = run_batch([Job(plan, x=x[0]), Job(other, x=x[0])], answer)
    assert mixed[:, 0].tolist() == [31.0, 3.0]


# --- observers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_observers_see_every_row(sampler: str) -> None:
    plan = compile_plan(sampler, steps=4)
    steps = seen_by(plan, seeds=[1, 2])
    assert [s.index for s in steps] == list(range(plan.nfe))
    assert [s.row for s in steps] == list(plan.rows)
    assert all(s.images == (0, 1) for s in steps)
    for step, following in itertools.pairwise(steps):
        if not following.row.pre_noise:
            assert torch.equal(step.x_next, following.x)
            assert step.next_levels[0].alpha == following.row.level.alpha
            assert step.next_levels[0].sigma == pytest.approx(following.row.level.sigma, rel=1e-12)
    assert steps[-1].next_levels == (plan.end,)


def test_observers_see_the_prediction_and_the_result() -> None:
    plan = compile_plan("ddim", steps=4)
    steps: list[StepSeen] = []
    x = run(plan, TOY, shape=SHAPE, seeds=3, observers=[steps.append])
    for s in steps:
        assert torch.equal(s.x0, TOY(s.x, s.row.level, s.row.time))
    assert torch.equal(steps[-1].x_next, x)
    assert torch.allclose(steps[-1].x0, x, atol=1e-6)  # DDIM ends in its last x0; float32


def test_watching_changes_nothing() -> None:
    plan = compile_plan("dpmpp_sde", steps=4)
    assert torch.equal(run(plan, TOY, shape=SHAPE, observers=[lambda s: None]), run(plan, TOY, shape=SHAPE))


def test_churn_is_seen_before_its_call() -> None:
    plan = compile_plan("euler", steps=3, s_churn=1.0)
    steps = seen_by(plan, seeds=4)
    for step, following in itertools.pairwise(steps):
        low = math.hypot(step.next_levels[0].sigma, following.row.pre_noise)
        assert low == pytest.approx(following.row.level.sigma, rel=1e-9)
        assert not torch.equal(step.x_next, following.x)


# --- constraints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["ddim", "euler_a", "heun", "dpmpp_2m", "unipc", "dpmpp_sde", "plms", "lms"])
def test_inpainting_keeps_the_known_part(sampler: str) -> None:
    known = torch.linspace(-1, 1, 105).reshape(SHAPE)
    mask = torch.zeros(SHAPE)
    mask[:, :, :3] = 1.0
    fresh = torch.Generator().manual_seed(0)
    called = 0

    def paste(seen: StepSeen) -> Tensor:
        nonlocal called
        called += 1
        level = seen.next_levels[0]
        noised = level.alpha * known + level.sigma * torch.randn(SHAPE, generator=fresh)
        return torch.where(mask > 0, noised, seen.x_next)

    plan = compile_plan(sampler, steps=6)
    x = run(plan, TOY, shape=SHAPE, seeds=[1, 2], constraints=[paste])
    free = run(plan, TOY, shape=SHAPE, seeds=[1, 2])
    assert called == plan.nfe
    assert torch.equal(x[:, :, :, :3], known[None, :, :, :3].expand(2, -1, -1, -1))
    assert not torch.equal(x[0, :, :, 3:], known[:, :, 3:])
    assert not torch.equal(x[:, :, :, :3], free[:, :, :, :3])


def test_constraints_act_in_turn_and_before_observers() -> None:
    plan = compile_plan("ddim", steps=2)
    steps: list[StepSeen] = []
    x = run(
        plan,
        TOY,
        shape=(4,),
        constraints=[lambda s: s.x_next * 0 + 3, lambda s: s.x_next + 1],
        observers=[steps.append],
    )
    assert torch.equal(x, torch.full((1, 4), 4.0))
    assert torch.equal(steps[0].x_next, torch.full((1, 4), 4.0))
    assert torch.equal(steps[1].x, torch.full((1, 4), 4.0))


def test_constraints_know_the_level_of_each_image_in_a_mixed_batch() -> None:
    a, b = compile_plan("ddim", steps=2), compile_plan("euler", steps=3)
    levels: list[tuple[Level, ...]] = []

    def note(seen: StepSeen) -> Tensor:
        levels.append(seen.next_levels)
        return seen.x_next

    run_batch([Job(a, 1), Job(b, 2)], TOY, shape=(4,), constraints=[note])
    assert levels == [(a.rows[1].level, b.rows[1].level), (a.end, b.rows[2].level), (b.end,)]


# --- cancellation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3])
def test_cancellation_stops_between_rows(after: int) -> None:
    calls = 0

    def count(x: Tensor, level, time) -> Tensor:
        nonlocal calls
        calls += 1
        return TOY(x, level, time)

    with pytest.raises(Cancelled, match=f"row {after}"):
        run(compile_plan("heun", steps=5), count, shape=(4,), cancelled=lambda: calls >= after)
    assert calls == after


def test_an_observer_may_cancel_a_mixed_batch() -> None:
    calls: list[int] = []
    with pytest.raises(Cancelled):
        run_batch(
            [Job(compile_plan("ddim", steps=5)), Job(compile_plan("euler", steps=9))],
            TOY,
            shape=(4,),
            observers=[lambda s: calls.append(s.index)],
            cancelled=lambda: len(calls) == 2,
        )
    assert calls == [0, 1]


# --- dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sampler", ["ddim", "heun", "dpmpp_2m", "ddpm", "unipc"])
def test_a_half_precision_network_leaves_the_state_in_float32(sampler: str, dtype: torch.dtype) -> None:
    asked: list[torch.dtype] = []

    def half(x: Tensor, time: Tensor) -> Tensor:
        asked.append(x.dtype)
        return network(x, time).to(dtype)

    plan = compile_plan(sampler, steps=5)
    steps: list[StepSeen] = []
    x = run(plan, denoiser(half), shape=SHAPE, observers=[steps.append])
    assert x.dtype == torch.float32
    assert {t.dtype for s in steps for t in (s.x, s.x0, s.x_next)} == {torch.float32}
    assert set(asked) == {torch.float32}
    # 5 steps whose outputs are rounded to 8 or 11 bits: bfloat16 keeps 2⁻⁹ of each, times 1/alpha = 14.6 at the start
    exact = run(plan, TOY, shape=SHAPE)
    assert (x - exact).abs().max() < (0.5 if dtype == torch.bfloat16 else 0.06)


@pytest.mark.parametrize("given_dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_x_of_low_precision_is_widened(given_dtype: torch.dtype) -> None:
    x = torch.ones(2, 4).to(given_dtype)
    assert run(compile_plan("ddim", steps=2), TOY, x).dtype == torch.float32
    assert x.dtype == given_dtype


def test_float64_stays_float64() -> None:
    assert run(compile_plan("ddpm", steps=3), TOY, shape=(4,), dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_callers_x_is_left_alone(sampler: str) -> None:
    x = torch.full((2, 4), 0.5)
    run(compile_plan(sampler, steps=4), TOY, x)
    assert torch.equal(x, torch.full((2, 4), 0.5))


# --- guidance registers and other noise ------------------------------------------------------------------------


def test_the_cfgpp_family_reads_the_unconditional_prediction() -> None:
    plan = compile_plan("euler_cfgpp", steps=1)
    level = plan.rows[0].level
    x = torch.full((1, 4), 2.0)
    found = run(plan, lambda x, lv, t: Prediction(x * 0 + 0.5, x * 0 + 0.25), x)
    assert torch.equal(found, torch.full((1, 4), 0.5))  # one step to sigma 0 is the guided x0
    two = compile_plan("euler_cfgpp", steps=2)
    a, b = two.rows[0].level, two.rows[1].level
    steps: list[StepSeen] = []
    run(two, lambda x, lv, t: Prediction(x * 0 + 0.5, x * 0 + 0.25), x, observers=[steps.append])
    wanted = 0.5 * b.alpha + (2.0 - 0.25 * a.alpha) * b.sigma / a.sigma  # Chung et al. 2024, alg. 2
    assert steps[0].x_next[0, 0].item() == pytest.approx(wanted, rel=1e-6)
    assert level == a


def test_a_brownian_source_takes_the_place_of_philox() -> None:
    plan = compile_plan("ddpm", steps=4)
    a = run(plan, TOY, shape=(6,), noise=Brownian([3]))
    assert torch.equal(a, run(plan, TOY, shape=(6,), noise=Brownian([3])))
    assert not torch.equal(a, run(plan, TOY, shape=(6,), seeds=3))


def test_one_brownian_path_on_two_grids_gives_near_images() -> None:
    """One path on two grids leads to nearly one image; plain Philox numbers its intervals by grid, so to another."""
    data, seeds = oracle.smooth(dim=8), [1, 2, 3]
    plans = [compile_plan("ddpm", steps=n, grid="exponential") for n in (20, 30)]

    def gap(source) -> float:
        a, b = (run(p, data, shape=(8,), seeds=seeds, noise=source(seeds), dtype=torch.float64) for p in plans)
        return oracle.distance(a, b)

    assert gap(Brownian) < 0.3 * gap(Philox)


# --- from a network to a denoiser ------------------------------------------------------------------------------


class Spy:
    """A network that notes what it was given."""

    def __init__(self) -> None:
        self.x: list[Tensor] = []
        self.time: list[Tensor] = []

    def __call__(self, x: Tensor, time: Tensor) -> Tensor:
        self.x.append(x)
        self.time.append(time)
        return x * 0


@pytest.mark.parametrize(
    ("schedule", "target", "scale"),
    [
        ("scaled_linear", "eps", lambda a, s: 1 / math.hypot(a, s)),
        ("edm", "edm", lambda a, s: 1 / math.hypot(s, 0.5 * a)),
        ("flow", "flow", lambda a, s: 1 / (a + s)),
    ],
)
@pytest.mark.parametrize("sampler", ["ddim", "euler", "dpmpp_2m"])
def test_the_network_sees_x_as_it_was_trained(sampler: str, schedule: str, target: str, scale) -> None:
    spy, steps = Spy(), []
    plan = compile_plan(sampler, schedule=schedule, target=target, steps=4)
    run(plan, denoiser(spy, schedule, target), shape=(6,), observers=[steps.append], seeds=[1, 2])
    for x, told, step in zip(spy.x, spy.time, steps, strict=True):
        level = step.row.level
        assert torch.allclose(x, step.x * scale(level.alpha, level.sigma), rtol=1e-6)
        assert told.tolist() == pytest.approx([step.row.time] * 2, rel=1e-6)


def test_ddim_and_euler_ask_the_network_the_same_question() -> None:
    """One lives in the vp frame, the other in ve: the network must not notice."""
    a, b = Spy(), Spy()
    run(compile_plan("ddim", steps=4), denoiser(a), shape=(6,))
    run(compile_plan("euler", steps=4), denoiser(b), shape=(6,))
    for one, other in zip(a.x, b.x, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_mixed_batch_is_told_a_time_an_image() -> None:
    spy = Spy()
    a, b = compile_plan("ddim", steps=2), compile_plan("euler", steps=3)
    run_batch([Job(a, 1), Job(b, 2)], denoiser(spy), shape=(4,))
    assert [t.tolist() for t in spy.time] == [
        pytest.approx([a.rows[0].time, b.rows[0].time]),
        pytest.approx([a.rows[1].time, b.rows[1].time]),
        pytest.approx([b.rows[2].time]),
    ]


@pytest.mark.parametrize("target", ["eps", "x0", "v"])
def test_every_target_gives_the_x0_that_was_meant(target: str) -> None:
    truth = torch.linspace(-1, 1, 6)[None]
    curve = schedules.make("scaled_linear")

    def perfect(x: Tensor, time: Tensor) -> Tensor:
        level = curve.level(float(time[0]))
        eps = (x - level.alpha * truth) / level.sigma
        return {"eps": eps, "x0": truth, "v": level.alpha * eps - level.sigma * truth}[target]

    x = run(compile_plan("dpmpp_2m", steps=5, target=target), denoiser(perfect, curve, target), shape=(6,))
    assert torch.allclose(x, truth, atol=1e-4)  # float32: eps → x0 multiplies roundings by sigma/alpha = 14.6


def test_a_target_that_the_schedule_cannot_carry_is_refused() -> None:
    with pytest.raises(PellucidError, match="carries") as refused:
        denoiser(network, "scaled_linear", "flow")
    assert refused.value.code == "target-schedule"


# --- filters ---------------------------------------------------------------------------------------------------


def test_clip_acts_on_the_prediction() -> None:
    steps: list[StepSeen] = []
    wild = denoiser(lambda x, t: x * 5, "scaled_linear", "x0", Clip(0.7))
    x = run(compile_plan("dpmpp_2m", target="x0", steps=5), wild, shape=(50,), observers=[steps.append])
    assert max(s.x0.abs().max().item() for s in steps) == pytest.approx(0.7)
    assert x.abs().max() <= 0.7 + 1e-6


def test_dynamic_threshold_clips_each_image_at_its_quantile() -> None:
    x0 = torch.stack([torch.linspace(-0.5, 0.5, 1001), torch.linspace(-4, 4, 1001), torch.linspace(-4, 4, 1001) * 5])
    out = DynamicThreshold(quantile=0.9, most=10.0)(x0)
    assert torch.equal(out[0], x0[0])  # Saharia et al. 2022: inside [−1, 1] nothing happens
    assert out[1].max().item() == pytest.approx(1.0)
    assert out[1][501 + 100].item() == pytest.approx(x0[1][501 + 100].item() / 3.6, rel=1e-3)  # the 0.9 quantile of |x|
    assert out[2][501 + 100].item() == pytest.approx(x0[2][501 + 100].item() / 10.0, rel=1e-3)  # `most` caps it


def test_dynamic_threshold_does_not_mix_images() -> None:
    x0 = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 3
    rule = DynamicThreshold(quantile=0.8, most=5.0)
    assert torch.equal(rule(x0)[3], rule(x0[3:4])[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: Clip(0.0),
        lambda: Clip(-1.0),
        lambda: Clip(math.nan),
        lambda: DynamicThreshold(-0.1),
        lambda: DynamicThreshold(1.1),
        lambda: DynamicThreshold(0.9, 0.0),
    ],
)
def test_bad_filters_are_refused(make) -> None:
    with pytest.raises(PellucidError) as refused:
        make()
    assert refused.value.code == "filter"


# --- cost ------------------------------------------------------------------------------------------------------


def live_tensors(shape: tuple[int, ...]) -> int:
    """Tensors of that shape that anything in the process still holds."""
    return sum(1 for thing in gc.get_objects() if type(thing) is Tensor and thing.shape == shape)


@pytest.mark.parametrize("sampler", ["euler", "lms", "pndm", "ddpm", "unipc", "dpmpp_sde"])
def test_a_run_holds_as_many_tensors_at_row_1000_as_at_row_10(sampler: str) -> None:
    shape = (1, 31, 37)  # a shape that nothing else here has

    def held(rows: int) -> list[int]:
        found: list[int] = []

        def look(seen: StepSeen) -> None:
            if seen.index % (rows // 2) == rows // 2 - 1:
                found.append(live_tensors(shape))

        plan = compile_plan(sampler, steps=rows, grid="linspace")
        run(plan, TOY, shape=shape[1:], observers=[look])
        return found

    few, many = held(10), held(1000)
    assert len(few) >= 2
    assert max(many) == max(few)
    assert max(few) <= 16  # five registers, the noise, and what the loop holds while it mixes them


PEAK = """
import resource, torch
from pellucid import compile_plan, run
torch.set_num_threads(1)
short, long = (compile_plan("dpmpp_3m_sde", steps=n, grid="linspace") for n in (10, 1000))
def peak(plan):
    run(plan, lambda x, level, time: x * 0.5, shape=(512, 512))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak(short), peak(long))
"""


@pytest.mark.slow
def test_peak_memory_is_the_same_for_10_and_for_1000_rows() -> None:
    out = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    few, many = (int(word) / 1024 for word in out.split())  # MiB
    # one kept tensor a row would be 1000 MiB; the plan itself and the allocator's slack are a few
    assert many - few < 16


def best_time(rows: int, images: int, numbers: int) -> float:
    plan = compile_plan("dpmpp_2m", steps=rows, grid="linspace")
    x = torch.ones(images, numbers)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run(plan, TOY, x)
        times.append(time.perf_counter() - begin)
    return min(times)


@pytest.mark.slow
def test_time_is_linear_in_rows_and_in_images() -> None:
    """Within a factor of two on a shared machine; a quadratic loop would be off by four."""
    few, many = best_time(50, 1, 16), best_time(200, 1, 16)
    assert 2 < many / few < 8
    few, many = best_time(10, 8, 65_536), best_time(10, 32, 65_536)
    assert many / few < 8


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda p: run(p, TOY), "shape"),
        (lambda p: run(p, TOY, torch.zeros(())), "shape"),
        (lambda p: run(p, TOY, torch.zeros(0, 3)), "shape"),
        (lambda p: run(p, TOY, torch.zeros(3, 4), seeds=[1, 2]), "seed"),
        (lambda p: run(p, TOY, shape=(4,), seeds=[]), "seed"),
        (lambda p: run(p, TOY, shape=(4,), seeds=-1), "seed"),
        (lambda p: run(p, TOY, shape=(4,), seeds=[1.5]), "seed"),
        (lambda p: run(p, lambda x, lv, t: x[:, :1], shape=(4,)), "shape"),
        (lambda p: run_batch([], TOY, shape=(4,)), "jobs"),
        (lambda p: run_batch([Job(p)], TOY), "shape"),
        (lambda p: run_batch([Job(p, seed=-1)], TOY, shape=(4,)), "seed"),
    ],
)
def test_bad_input_is_refused_by_name(call, code: str) -> None:
    with pytest.raises(PellucidError) as refused:
        call(compile_plan("ddpm", steps=3))
    assert refused.value.code == code


# --- who watches the run ---------------------------------------------------------------------------------------


class Watcher:
    """An observer that wants the run too, and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.runs: list[RunSeen] = []

    def begin_run(self, run: RunSeen) -> None:
        self.runs.append(run)
        self.told.append("begin")

    def mark(self, work: str) -> None:
        self.told.append(work)

    def __call__(self, seen: StepSeen) -> None:
        self.told.append(f"step {seen.index}")


def test_an_observer_may_see_the_run_and_what_the_loop_is_at() -> None:
    plan = compile_plan("euler_a", steps=2)
    watcher, x, source = Watcher(), torch.ones(2, 4), Philox([1, 2])
    run(plan, TOY, x, noise=source, observers=[watcher])
    (begun,) = watcher.runs
    assert begun.plans == (plan, plan)
    assert begun.x is x
    assert begun.noise is source
    first = ["begin", "model", "update", "noise", "update", "observe", "step 0", "update"]
    assert watcher.told == [*first, "model", "update", "observe", "step 1", "update"]


def test_churn_and_constraints_are_marked_and_every_watcher_is_told() -> None:
    plan = compile_plan("euler", steps=1, s_churn=1.0)
    assert plan.rows[0].pre_noise > 0
    watchers = [Watcher(), Watcher()]
    run(plan, TOY, shape=(4,), observers=watchers, constraints=[lambda seen: seen.x_next])
    wanted = ["begin", "noise", "model", "update", "constrain", "observe", "step 0", "update"]
    assert [watcher.told for watcher in watchers] == [wanted, wanted]


def test_a_watched_mixed_batch_has_one_plan_an_image() -> None:
    watcher = Watcher()
    jobs = [Job(compile_plan("heun", steps=2), 1), Job(compile_plan("ddim", steps=1), 2)]
    run_batch(jobs, TOY, shape=(4,), observers=[watcher])
    assert [plan.name for plan in watcher.runs[0].plans] == ["heun", "ddim"]
    assert watcher.told.count("model") == jobs[0].plan.nfe


# --- a plan for another denoiser ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made_for", "words"),
    [
        ({"schedule": "cosine"}, "(scaled_linear, eps); got one for cosine, eps."),
        ({"target": "v"}, "(scaled_linear, eps); got one for scaled_linear, v."),
        (
            {"schedule": schedules.scaled_linear(beta_end=0.02)},
            "got one for scaled_linear, eps, with other settings of the schedule.",
        ),
    ],
)
def test_a_plan_for_another_schedule_or_target_is_refused(made_for, words) -> None:
    plan = compile_plan("ddim", **{"schedule": "scaled_linear", "target": "eps", **made_for}, steps=3)
    with pytest.raises(PellucidError) as caught:
        run(plan, TOY, shape=SHAPE)
    assert words in str(caught.value)
    assert caught.value.code == "plan-model"
    with pytest.raises(PellucidError, match="must be made for the denoiser's schedule and target"):
        run_batch([Job(compile_plan("ddim", steps=3)), Job(plan)], TOY, shape=SHAPE)


def test_a_denoiser_that_names_no_schedule_takes_any_plan() -> None:
    for schedule in ("cosine", "scaled_linear"):
        assert run(compile_plan("ddim", schedule=schedule, steps=2), oracle.ring(), shape=(2,)).shape == (1, 2)


# --- gradients ---------------------------------------------------------------------------------------------------


def test_gradients_are_off_unless_they_are_asked_for() -> None:
    weight = torch.tensor(0.5, requires_grad=True)
    plan = compile_plan("ddim", steps=2)
    seen: list[bool] = []

    def trained(x: Tensor, time: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x * weight

    plain = denoiser(trained, "scaled_linear", "eps")
    assert not run(plan, plain, shape=SHAPE).requires_grad
    assert not run_batch([Job(plan)], plain, shape=SHAPE).requires_grad
    assert not plain(torch.ones(1, *SHAPE), plan.rows[0].level, plan.rows[0].time).requires_grad
    assert not any(seen)
    with pytest.raises(PellucidError, match=r"pellucid.denoiser\(…, gradients=True\)"):
        run(plan, plain, shape=SHAPE, gradients=True)
    kept = denoiser(trained, "scaled_linear", "eps", gradients=True)
    assert not run(plan, kept, shape=SHAPE).requires_grad
    run(plan, kept, shape=SHAPE, gradients=True).sum().backward()
    assert weight.grad is not None
    assert weight.grad != 0


# --- the range of the data ----------------------------------------------------------------------------------------


def said(work) -> list[str]:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    assert all(issubclass(one.category, PellucidWarning) and one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def test_x0_that_leaves_the_range_of_the_data_is_told_once_with_its_remedy() -> None:
    plan = compile_plan("ddim", steps=20)
    (words,) = said(lambda: run(plan, TOY, shape=SHAPE, seeds=[1, 2]))
    assert "x0 left the range of the data" in words
    assert "x0_filter=pellucid.Clip(1.0)" in words
    (words,) = said(lambda: run_batch([Job(plan, 1), Job(compile_plan("euler", steps=3), 2)], TOY, shape=SHAPE))
    assert "Clip" in words
    assert said(lambda: run(plan, denoiser(network, "scaled_linear", "eps", Clip(1.0)), shape=SHAPE)) == []


def test_one_image_of_many_is_enough() -> None:
    plan = compile_plan("ddim", steps=4)
    x = torch.stack([torch.full(SHAPE, 0.1), torch.full(SHAPE, 1.0)])
    power = run(plan, TOY, x).square().mean((1, 2, 3))
    assert power[0] < 10 < power[1]
    assert len(said(lambda: run(plan, TOY, x))) == 1
    assert said(lambda: run(plan, TOY, x[:1])) == []


def test_what_is_no_image_yet_and_what_has_a_scale_of_its_own_is_not_judged() -> None:
    """A run that ends in noise, and an exact density whose data are 30 times as large as pixels."""
    end = float(schedules.make("edm").time_at(40.0))
    noisy = compile_plan("euler", schedule="edm", steps=4, between=(None, end))
    x = run(noisy, denoiser(network, "edm", "edm"), shape=SHAPE)
    assert x.square().mean() > 100
    assert said(lambda: run(noisy, denoiser(network, "edm", "edm"), shape=SHAPE)) == []
    world = oracle.Mixture(torch.full((1, 4), 30.0).double(), torch.ones(1).double(), torch.ones(1).double())
    assert said(lambda: run(compile_plan("ddim", steps=10), world, shape=(4,))) == []
