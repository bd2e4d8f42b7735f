"""The objective: right answers, weights that mean the same for every target, times as distributed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid import Level, PellucidError, denoiser, schedules
from pellucid.core import target as targets
from pellucid.train.config import read
from pellucid.train.draws import Draws
from pellucid.train.objective import WEIGHTINGS, BatchLoss, ByLevel, Objective, Times, Weighting, dropped

CASES = [
    ("linear", "eps"),
    ("cosine", "x0"),
    ("scaled_linear", "v"),
    ("flow", "flow"),
    ("edm", "edm"),
    ("edm", "x0"),
    ("vp_cosine", "v"),
]
ABOVE = [k for k in WEIGHTINGS if k != "uniform"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(count: int = 64) -> torch.Tensor:
    return torch.randn(count, 3, 4, 4, generator=seeded(9), dtype=torch.float64) * 0.5


def draws(x0: torch.Tensor, step: int = 0) -> Draws:
    return Draws(seed=0, step=step, batch=len(x0))


# --- the question ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "target"), CASES)
def test_the_right_answer_denoises_to_the_data(schedule: str, target: str) -> None:
    """What is trained is what `denoiser` reads: the answer, read at its time, gives x0 back."""
    objective = Objective(schedules.make(schedule), target)
    x0 = batch()
    asked = objective.ask(x0, draws(x0))
    for i in range(len(x0)):
        level = objective.schedule.level(float(asked.time[i].double()))
        scale = 1.0 if schedule != "edm" else 1 / math.hypot(level.sigma, 0.5 * level.alpha)
        reads = denoiser(lambda x, time, i=i: asked.answer[i : i + 1], schedule, target)
        found = reads(asked.x[i : i + 1] / scale, level, float(asked.time[i]))
        slope = abs(targets.to_x0(target, level)[1])
        assert (found - x0[i]).abs().max() < 1e-4 * max(slope, 1.0)  # times are told in float32


@pytest.mark.parametrize(("schedule", "target"), CASES)
def test_the_right_answer_costs_nothing_and_a_wrong_one_its_square(schedule: str, target: str) -> None:
    objective = Objective(schedules.make(schedule), target)
    asked = objective.ask(batch(), draws(batch()))
    assert float(objective.grade(asked, asked.answer).loss) == 0.0
    off = objective.grade(asked, asked.answer + 0.5)
    assert float(off.loss) == pytest.approx(0.25, rel=1e-5)
    assert torch.allclose(off.errors, torch.full((64,), 0.25), rtol=1e-4)


def test_x_has_the_variance_of_its_level() -> None:
    objective = Objective(schedules.make("scaled_linear"), "eps")
    x0 = torch.randn(4096, 1, 4, 4, generator=seeded(1))
    asked = objective.ask(x0, draws(x0))
    for low, high in ((0, 200), (400, 600), (800, 1000)):
        chosen = asked.x[(asked.time >= low) & (asked.time < high)]
        assert float(chosen.var()) == pytest.approx(1.0, abs=0.05)  # unit data stays of unit variance


def test_a_seed_repeats_the_question() -> None:
    objective = Objective(schedules.make("linear"), "v", noise_offset=0.1)
    first, again, other = (objective.ask(batch(), draws(batch(), s)) for s in (5, 5, 6))
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.x, other.x)


def test_noise_offset_moves_whole_channels() -> None:
    plain, moved = (Objective(schedules.make("linear"), "eps", noise_offset=o) for o in (0.0, 1.0))
    x0 = torch.zeros(512, 3, 8, 8)
    means = [objective.ask(x0, draws(x0)).answer.mean((2, 3)).var() for objective in (plain, moved)]
    assert float(means[0]) == pytest.approx(1 / 64, rel=0.2)
    assert float(means[1]) == pytest.approx(1 + 1 / 64, rel=0.2)


def test_a_network_with_a_variance_is_graded_on_its_mean() -> None:
    objective = Objective(schedules.make("linear"), "eps")
    asked = objective.ask(batch(), draws(batch()))
    out = torch.cat([asked.answer, torch.full_like(asked.answer, 7.0)], dim=1)
    assert float(objective.grade(asked, out).loss) == 0.0


# --- weights -----------------------------------------------------------------------------------------------------


@given(
    lam=st.floats(-6, 6), kind=st.sampled_from(ABOVE), gamma=st.floats(0.5, 20), bias=st.floats(-3, 3),
    target=st.sampled_from(["eps", "x0", "v", "flow", "edm", "score"]),
)  # fmt: skip
def test_a_weighting_means_the_same_for_every_target(
    lam: float, kind: Any, gamma: float, bias: float, target: Any
) -> None:
    """The weighted squared error of any target is that of x0: min-SNR for v is not min-SNR for eps."""
    level = Level(math.exp(lam) / math.hypot(math.exp(lam), 1), 1 / math.hypot(math.exp(lam), 1))
    weighting = Weighting(kind, gamma, bias)
    mistake = 0.3  # of x0; the same prediction, said as another target
    said = mistake * targets.from_x0(target, level)[1]
    in_target = weighting.on(target, level) * said**2
    assert in_target == pytest.approx(weighting.on_x0(level) * mistake**2, rel=1e-9)


@given(lam=st.floats(-6, 6))
def test_known_forms(lam: float) -> None:
    snr = math.exp(2 * lam)
    level = Level(math.sqrt(snr / (1 + snr)), math.sqrt(1 / (1 + snr)))
    clip = Weighting("min_snr", gamma=5.0)
    assert clip.on("eps", level) == pytest.approx(min(snr, 5) / snr)
    assert clip.on("v", level) == pytest.approx(min(snr, 5) / (snr + 1))
    assert clip.on("x0", level) == pytest.approx(min(snr, 5))
    assert Weighting("snr").on("eps", level) == pytest.approx(1.0)
    assert Weighting("sigmoid", bias=1.0).on("eps", level) == pytest.approx(1 / (1 + math.exp(2 * lam - 1.0)))
    assert Weighting("soft_min_snr", gamma=4.0).on("x0", level) == pytest.approx(1 / (1 / snr + 1 / 4))
    sigma = math.exp(-lam)
    edm = Weighting("edm").on_x0(Level(1.0, sigma))
    assert edm == pytest.approx((sigma**2 + 0.25) / (sigma * 0.5) ** 2)
    assert Weighting("edm").on("edm", Level(1.0, sigma)) == pytest.approx(1.0)


def test_eps_at_pure_noise_costs_nothing() -> None:
    assert Weighting("min_snr").on("eps", Level(0.0, 1.0)) == 0.0
    assert Weighting("uniform").on("eps", Level(0.0, 1.0)) == 1.0


# --- times -------------------------------------------------------------------------------------------------------


def test_uniform_times_are_whole_on_a_table_and_cover_it() -> None:
    table = schedules.make("linear")
    times = Times(stratified=True).draw(1000, table, seeded())
    assert sorted(times.astype(int)) == list(range(1000))  # a stratum a training time
    plain = Times().draw(20000, table, seeded())
    assert (plain == plain.round()).all()
    assert plain.min() == 0
    assert plain.max() == 999
    assert plain.mean() == pytest.approx(499.5, abs=6)


def test_logit_normal_times() -> None:
    flow = schedules.make("flow")
    parts = Times("logit_normal", 0.5, 0.8).draw(20000, flow, seeded()) / flow.span[1]
    logits = np.log(parts / (1 - parts))
    assert logits.mean() == pytest.approx(0.5, abs=0.02)
    assert logits.std() == pytest.approx(0.8, abs=0.02)


def test_edm_times() -> None:
    edm = schedules.make("edm")
    times = Times("edm", -1.2, 1.2).draw(20000, edm, seeded())
    logs = np.log([edm.level(t).sigma for t in times])
    assert logs.mean() == pytest.approx(-1.2, abs=0.03)
    assert logs.std() == pytest.approx(1.2, abs=0.03)


@pytest.mark.parametrize(("kind", "mean", "std"), [("logit_normal", 0.0, 1.0), ("edm", -1.2, 1.2)])
def test_a_kind_has_its_papers_mean_and_std_where_none_are_given(kind: Any, mean: float, std: float) -> None:
    """Esser et al. 2024, section 3.1; Karras et al. 2022, table 1."""
    edm = schedules.make("edm")
    read_in = read(Times, {"kind": kind}, "times")
    for asked in (Times(kind), read_in, Times(kind, std=std), Times(kind, mean)):
        assert np.array_equal(asked.draw(64, edm, seeded()), Times(kind, mean, std).draw(64, edm, seeded()))
    assert not np.array_equal(read_in.draw(64, edm, seeded()), Times(kind, 0.3, 0.9).draw(64, edm, seeded()))
    assert Times("edm", 0.0, 1.0).normal == (0.0, 1.0)


@pytest.mark.parametrize("kind", ["uniform", "logit_normal", "edm"])
def test_strata_lower_the_variance_and_keep_the_mean(kind: Any) -> None:
    edm = schedules.make("edm")
    means = {
        stratified: [float(np.mean(Times(kind, stratified=stratified).draw(32, edm, seeded(s)))) for s in range(200)]
        for stratified in (False, True)
    }
    assert np.std(means[True]) < 0.25 * np.std(means[False])
    assert np.mean(means[True]) == pytest.approx(np.mean(means[False]), abs=3 * np.std(means[False]) / math.sqrt(200))


# --- conditions, bins, bad input ---------------------------------------------------------------------------------


def test_dropout_takes_the_condition_of_its_share() -> None:
    objective = Objective(schedules.make("linear"), "eps", dropout=0.25)
    seen: list[torch.Tensor] = []

    def network(x: torch.Tensor, time: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels)
        return x

    x0, labels = torch.zeros(4000, 1, 2, 2), torch.ones(4000)
    objective(network, x0, draws(x0), {"labels": labels}, {"labels": torch.zeros(4000)})
    assert float(seen[0].mean()) == pytest.approx(0.75, abs=0.03)
    one = dropped({"a": torch.ones(3, 2)}, {"a": torch.zeros(3, 2)}, torch.tensor([True, False, True]))
    assert one["a"].tolist() == [[0, 0], [1, 1], [0, 0]]


def test_errors_by_level() -> None:
    bins = ByLevel(-2, 2, 4)
    lam = torch.tensor([-5.0, -1.5, 0.5, 0.6, 9.0])
    bins.add(BatchLoss(torch.tensor(0.0), torch.tensor([1.0, 3.0, 2.0, 4.0, 8.0]), lam))
    assert [(r["lam"], r["count"], r["mean"]) for r in bins.rows()] == [(-1.5, 2, 2.0), (0.5, 2, 3.0), (1.5, 1, 8.0)]
    assert bins.rows()[0]["std"] == pytest.approx(1.0)


def test_only_the_first_batch_sends_its_bins_to_the_errors() -> None:
    """A GPU would have to be waited for at every step."""
    sent: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and isinstance(args[0], torch.Tensor) and out.device != args[0].device:
                sent.append(str(func))
            return out

    bins, there = ByLevel(), torch.ones(4, device="meta")
    counts = []
    for _ in range(3):
        with Watch():
            bins.add(BatchLoss(there[0], there, there))
        counts.append(len(sent))
    assert counts == [2, 2, 2]


def test_a_step_of_training_lowers_the_loss() -> None:
    """One linear layer on one-dimensional data: the objective can be minimised by gradient descent."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 16), torch.nn.Unflatten(1, (1, 4, 4)))
    objective = Objective(schedules.make("flow"), "flow", Times(stratified=True))
    x0 = torch.randn(256, 1, 4, 4, generator=seeded(3)) * 0.1 + 0.5
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    losses = []
    for step in range(60):
        loss = objective(lambda x, time: network(x), x0, draws(x0, step)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-10:]) < 0.75 * np.mean(losses[:5])


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: Times("sometimes"), "times"),
        (lambda: Times(std=0.0), "times"),
        (lambda: Times(mean=math.nan), "times"),
        (lambda: Times().draw(0, schedules.make("linear")), "times"),
        (lambda: Weighting("heavy"), "weighting"),
        (lambda: Weighting(gamma=-1.0), "weighting"),
        (lambda: Objective(schedules.make("linear"), "flow"), "target-schedule"),
        (lambda: Objective(schedules.make("linear"), "eps", dropout=1.5), "objective"),
        (
            lambda: Objective(schedules.make("linear"), "eps", dropout=0.5)(lambda x, t: x, batch(), draws(batch())),
            "objective",
        ),
        (lambda: ByLevel(1, 0), "bins"),
    ],
)
def test_bad_input_is_one_line(make: Any, code: str) -> None:
    with pytest.raises(PellucidError) as error:
        make()
    assert error.value.code == code
    assert "\n" not in str(error.value)
