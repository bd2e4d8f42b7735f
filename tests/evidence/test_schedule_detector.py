"""The schedule detector against networks that truly believe in a schedule, exact ones and trained ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import believers
import numpy as np
import pytest
import small_denoisers as small

from pellucid.core import schedule as schedules
from pellucid.core.schedule import Schedule
from pellucid.evidence.doctor.detectors import best_times, lowest, schedule_findings
from pellucid.evidence.doctor.hypotheses import (
    ALIKE,
    RATIOS,
    TABLED,
    alike,
    candidates,
    detect,
    known_schedules,
    schedule_name,
)
from pellucid.evidence.doctor.probe import Probe, probe_of

FOUR = ("linear", "scaled_linear", "cosine", "sqrt_alpha_bar", "sqrt_beta")


@pytest.mark.parametrize("name", TABLED)
def test_an_exact_network_is_named(name: str) -> None:
    """Whatever its config says, and with few images."""
    for said in ("scaled_linear", name):
        lying = believers.probe((name, "eps"), (said, "eps"))
        answer = detect(lying).schedule
        assert answer.name == name
        assert answer.confidence >= 0.99
        assert answer.scores.images <= 64
        codes = [finding.code for finding in schedule_findings(answer, lying)]
        assert codes == ([] if said == name else ["schedule-mismatch"])


def test_flow_and_edm_are_named() -> None:
    for name, target in (("flow", "flow"), ("edm", "edm")):
        lying = believers.probe((name, target), ("linear", "eps"))  # type: ignore[arg-type]
        assert detect(lying).schedule.name == name


def test_the_cure_is_the_config_of_training() -> None:
    lying = believers.probe(("cosine", "v"), ("linear", "v"))
    (found,) = schedule_findings(detect(lying).schedule, lying)
    assert '"beta_schedule": "squaredcos_cap_v2"' in found.fix
    lying = believers.probe(("scaled_linear", "v"), ("linear", "v"))
    (found,) = schedule_findings(detect(lying).schedule, lying)
    assert '"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012' in found.fix
    facts = dict(found.evidence)
    told = facts["time of least error at sigma/alpha 1.2"]
    assert told == pytest.approx(float(schedules.make("scaled_linear").time_at(1.2)), abs=10)


def test_the_times_that_a_network_believes_in_are_found() -> None:
    """To a hundredth of the span."""
    for name in ("linear", "cosine", "sqrt_beta"):
        asked = believers.probe((name, "eps"), ("scaled_linear", "eps"), count=16)
        for one in best_times(asked, "eps", asked.schedule, count=16):
            assert one.time == pytest.approx(float(schedules.make(name).time_at(one.ratio)), abs=10)


def test_betas_of_ones_own_are_told() -> None:
    """A schedule that is none of the known ones, while the config names the nearest."""
    bent = schedules.trained(np.linspace(1e-4, 0.02, 1000)[::-1].copy())
    lying = believers.probe((bent, "eps"), ("sqrt_beta", "eps"))
    answer = detect(lying).schedule
    nearest = replace(lying, schedule=candidates(lying.schedule)[answer.name])
    assert [finding.code for finding in schedule_findings(detect(nearest).schedule, nearest)] == ["schedule-unknown"]
    own = replace(lying, schedule=bent)
    assert list(schedule_findings(detect(own).schedule, own)) == []


def test_schedules_that_tell_the_same_times_are_one() -> None:
    linear = schedules.make("linear")
    assert alike(linear, schedules.make("linear", zero_snr=True))
    assert schedule_name(schedules.make("vp_linear")) == "linear"
    assert schedule_name(schedules.make("linear", beta_end=0.012)) == "linear of the config"
    found = candidates(schedules.make("linear", beta_end=0.012), known_schedules(linear))
    assert {"linear of the config", "linear", "scaled_linear"} <= set(found)


def test_known_schedules_are_told_apart() -> None:
    """No two candidates tell times that are alike."""
    found = candidates(schedules.make("linear"), known_schedules(schedules.make("linear")))
    pairs = [(a, b) for a in found for b in found if a < b and found[a].frame == found[b].frame]
    assert not [pair for pair in pairs if alike(found[pair[0]], found[pair[1]])]
    gaps = [gap(found[a], found[b]) for a, b in pairs]
    assert min(gaps) > ALIKE


def gap(one: Schedule, other: Schedule) -> float:
    apart = np.abs(one.time_at(np.array(RATIOS)) - other.time_at(np.array(RATIOS)))
    return float(apart.max() / (one.span[1] - one.span[0]))


def test_the_lowest_point_of_a_parabola_is_exact() -> None:
    times = np.array([0.0, 1.0, 2.5, 4.0, 7.0])
    at, _ = lowest(times, (times - 2.2) ** 2)
    assert at == pytest.approx(2.2)
    assert lowest(times, times)[0] == 0.0


# --- networks that were trained on it -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted([*small.PIXELS, *small.LATENTS]))
def test_a_trained_network_is_named(name: str, small_denoisers: small.Small) -> None:
    truth = (small.PIXELS | small.LATENTS)[name][0]
    check_named(probe_of(small_denoisers.subject(name)), truth)


def check_named(asked: Probe, truth: str) -> None:
    """It is found under its own config and under a wrong one, with at most 64 images; only the wrong one is told."""
    for said in (asked.schedule, schedules.make("cosine" if truth == "linear" else "linear")):
        lying = replace(asked, schedule=said)
        answer = detect(lying).schedule
        assert answer.name == truth, answer.doubt()
        sure, then = f"{answer.confidence:.4f} of {answer.scores.images}", answer.ranked[1:2]
        print(f"{truth} said {schedule_name(said)}: {sure}, then {then}")
        assert answer.confidence >= 0.99
        assert answer.scores.images <= 64
        codes = [finding.code for finding in schedule_findings(answer, lying)]
        assert codes == ([] if schedule_name(said) == truth else ["schedule-mismatch"])


@pytest.mark.slow
def test_real_networks_of_cifar_are_named(cifar_runs: list[Path], cifar: Path) -> None:
    for folder in cifar_runs:
        check_named(probe_of(small.cifar_subject(folder, cifar)), small.truth_of(folder)[0])
