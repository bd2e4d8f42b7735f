"""The target detector against networks that truly believe in a target, exact ones and trained ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import believers
import pytest
import small_denoisers as small
import torch

from pellucid.core.schedule import Target
from pellucid.evidence.doctor.checks import Finding
from pellucid.evidence.doctor.detectors import target_findings
from pellucid.evidence.doctor.hypotheses import Hypothesis, Scores, detect, judge
from pellucid.evidence.doctor.probe import Probe, probe_of
from pellucid.evidence.doctor.subject import UnsupportedCheck

EXACT: list[tuple[str, Target]] = [
    ("linear", "eps"), ("scaled_linear", "v"), ("cosine", "x0"), ("flow", "flow"), ("edm", "edm"), ("sqrt_beta", "v"),
]  # fmt: skip


def told(known: Probe) -> list[Finding]:
    return list(target_findings(detect(known).target, known.target, known.schedule))


@pytest.mark.parametrize("truth", EXACT)
def test_an_exact_network_is_named(truth: tuple[str, Target]) -> None:
    """Whatever its config says of the target, and with few images."""
    for said in ("eps", "v"):
        lying = ("scaled_linear", said)
        answer = detect(believers.probe(truth, lying)).target  # type: ignore[arg-type]
        assert answer.name == truth[1]
        assert answer.confidence >= 0.99
        assert answer.scores.images <= 64


def test_a_config_that_is_right_is_left_alone() -> None:
    for truth in EXACT:
        known = believers.probe(truth)
        assert told(known) == []


def test_a_config_that_is_wrong_is_told_with_its_cure() -> None:
    known = believers.probe(("scaled_linear", "v"), ("scaled_linear", "eps"))
    (found,) = told(known)
    assert found.code == "target-mismatch"
    assert found.severity == "error"
    assert '"prediction_type": "v_prediction"' in found.fix
    facts = dict(found.evidence)
    assert facts["confidence"] >= 0.99  # type: ignore[operator]
    assert facts["score as v"] < facts["score as eps"]  # type: ignore[operator]


def test_a_flow_network_in_a_schedule_of_betas_is_told() -> None:
    known = believers.probe(("flow", "flow"), ("scaled_linear", "eps"))
    (found,) = told(known)
    assert found.code == "target-mismatch"
    assert "FlowMatchEulerDiscreteScheduler" in found.fix


def test_a_network_that_knows_nothing_is_told() -> None:
    """Noise for an answer: no reading beats one factor."""
    known = believers.probe(("linear", "eps"), count=8)
    generator = torch.Generator().manual_seed(0)
    deaf = replace(known, network=lambda x, time, **told: torch.randn(x.shape, generator=generator))
    answer = detect(deaf).target
    assert not answer.denoises
    assert [finding.code for finding in told(deaf)] == ["denoises-nothing"]


def test_a_network_that_breaks_is_no_verdict() -> None:
    known = believers.probe(("linear", "eps"), count=4)
    broken = replace(known, network=lambda x, time, **told: torch.full_like(x, torch.nan))
    with pytest.raises(UnsupportedCheck, match="not finite"):
        detect(broken)


def test_one_image_is_too_few() -> None:
    with pytest.raises(UnsupportedCheck, match="too few"):
        detect(believers.probe(("linear", "eps"), count=1))


def test_few_images_are_never_called_sure() -> None:
    """Two images that agree are what two coins do in one of four throws."""
    answer = detect(believers.probe(("linear", "eps"), count=2)).target
    assert answer.name == "eps"
    assert answer.confidence <= 0.75


def test_confidence_is_calibrated() -> None:
    """Of weak evidence: as often as an answer is right, so sure it is on the mean; never surer by more than chance."""
    generator = torch.Generator().manual_seed(5)
    pair = (Hypothesis("eps", "a"), Hypothesis("v", "a"))
    claimed, right = [], []
    for _ in range(300):
        gap = 0.05 * torch.randn((), generator=generator)  # which of two is better, and by how much
        noise = torch.randn(2, 7, 16, generator=generator, dtype=torch.float64) * 0.5
        noise[1] += gap
        answer = judge(Scores(pair, noise), lambda one: one.target)
        claimed.append(answer.confidence)
        right.append((answer.name == "eps") == bool(gap > 0))
    mean, rate = sum(claimed) / len(claimed), sum(right) / len(right)
    assert 0.55 < rate < 0.95  # else it would say nothing
    assert abs(mean - rate) < 0.08


# --- networks that were trained for it ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(small.PIXELS))
def test_a_trained_pixel_network_is_named(name: str, small_denoisers: small.Small) -> None:
    check_named(probe_of(small_denoisers.subject(name)), small.PIXELS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(small.LATENTS))
def test_a_trained_latent_network_is_named(name: str, small_denoisers: small.Small) -> None:
    check_named(probe_of(small_denoisers.subject(name)), small.LATENTS[name][1])


def check_named(known: Probe, truth: str) -> None:
    """It is found under a config that is wrong, with at most 64 images, and told; under its own it is left alone."""
    lying = replace(known, target="v" if truth == "eps" else "eps")
    answer = detect(lying).target
    print(f"{truth}: {answer.name} {answer.confidence:.4f} of {answer.scores.images}")
    assert answer.name == truth
    assert answer.confidence >= 0.99
    assert answer.scores.images <= 64
    said = [list(target_findings(answer, target, known.schedule)) for target in (lying.target, known.target)]
    assert [[finding.code for finding in found] for found in said] == [["target-mismatch"], []]


@pytest.mark.slow
def test_real_networks_of_cifar_are_named(cifar_runs: list[Path], cifar: Path) -> None:
    for folder in cifar_runs:
        check_named(probe_of(small.cifar_subject(folder, cifar)), "eps")
