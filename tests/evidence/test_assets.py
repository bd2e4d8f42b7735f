"""What studies have left: the model of assets/ makes images, and the bundle's plans are what their evidence says."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import pellucid
from pellucid.evidence.tune.model import Pairs, TuningModel, make_sets, model_of, read_prompts
from pellucid.evidence.tune.table import Start
from pellucid.evidence.tune.teacher import Truth, errors, teach
from pellucid.pipeline.prepare import read_plan

ASSETS = Path(__file__).parents[2] / "assets"
PAIRS, TEACHER, SEED = 6, 40, 70_000  # seeds and prompts that no plan was tuned on


@pytest.fixture(scope="module")
def subject() -> TuningModel:
    return model_of(pellucid.load("scenes-128", device="cpu"), pellucid.guarded(4.0))


@pytest.fixture(scope="module")
def truth(subject: TuningModel) -> Truth:
    pairs = make_sets((PAIRS, PAIRS, PAIRS), SEED, read_prompts("scenes", 4 * PAIRS, SEED)).judge
    return teach(subject, pairs, TEACHER, PAIRS)


@pytest.mark.parametrize("calls", [8, 5])
def test_a_tuned_plan_is_nearer_to_the_converged_latents(subject: TuningModel, truth: Truth, calls: int) -> None:
    plan = read_plan(f"scenes-128/plans/{calls}.json")
    told = plan.evidence
    assert (plan.nfe, told["model_hash"], told["guidance"]) == (calls, subject.fingerprint, subject.guidance)
    assert told["held_out"]["tuned"]["pairs"] == 1000
    other = Start.parse(told["best_start"]).plan(subject.schedule, subject.target, calls)
    mine, theirs = (errors(one, subject, truth, PAIRS).sqrt().mean() for one in (plan, other))
    assert mine < 0.9 * theirs


def test_the_cifar_model_makes_images() -> None:
    """Neighbouring pixels of its images are alike, as those of photographs are, and images differ."""
    pipe = pellucid.load(ASSETS / "cifar10-cosine", device="cpu")
    network = pipe.components.network
    assert next(network.parameters()).dtype == torch.float32
    assert sum(weight.numel() for weight in network.parameters()) < 8e6
    images = pipe(n=4, seed=0, steps=10, grid="beta").images
    pixels = np.stack([np.asarray(image, float) for image in images])
    assert pixels.shape == (4, 32, 32, 3)
    for one in pixels:
        left, right = one[:, :-1].ravel(), one[:, 1:].ravel()
        assert np.corrcoef(left, right)[0, 1] > 0.85
        assert one.std() > 20
    assert np.abs(pixels[0] - pixels[1]).mean() > 20


@pytest.mark.parametrize("schedule", ["linear", "cosine", "sqrt_alpha_bar"])
def test_the_small_models_differ_by_their_schedule_alone(schedule: str) -> None:
    """At most 1 M weights and 2 MB each; the levels of the schedule that the name says, v, and finite images."""
    folder = ASSETS / f"cifar10-small-{schedule}"
    parts = pellucid.load(folder, device="cpu").components
    assert sum(weight.numel() for weight in parts.network.parameters()) < 1e6
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 2e6
    assert parts.target == "v"
    own, asked = (one.alpha_bar for one in (parts.schedule, pellucid.schedules.make(schedule)))
    np.testing.assert_allclose(own, asked, rtol=1e-6)
    image = np.asarray(pellucid.load(folder, device="cpu")(seed=0, steps=5).images[0], float)
    assert image.shape == (32, 32, 3)
    assert image.std() > 10


def test_the_tuned_plan_of_cifar_is_for_its_model_and_nearer() -> None:
    """Nearer to where many calls end than the best start was, for seeds that it was not tuned on."""
    plan = read_plan(ASSETS / "cifar10-cosine" / "plans" / "8.json")
    subject = model_of(pellucid.load(ASSETS / "cifar10-cosine", device="cpu"))
    told = plan.evidence
    assert (plan.nfe, told["model_hash"]) == (8, subject.fingerprint)
    truth = teach(subject, Pairs((SEED, SEED + 1)), 40, 2)
    other = Start.parse(told["best_start"]).plan(subject.schedule, subject.target, 8)
    mine, theirs = (errors(one, subject, truth, 2).mean() for one in (plan, other))
    assert mine < 0.8 * theirs


@pytest.mark.parametrize(
    ("name", "shape"), [("cifar10-small-linear", (3, 32, 32)), ("cifar10-small-cosine", (3, 32, 32))]
)
def test_a_sound_network_that_is_not_clipped_is_not_warned_of(name: str, shape: tuple[int, ...]) -> None:
    """The last x of every image is of the size of data, whatever the sampler."""
    parts = pellucid.load(ASSETS / name, device="cpu").components
    denoise = pellucid.denoiser(parts.network, parts.schedule, parts.target)
    for sampler in ("ddim", "dpmpp_2m", "euler_a"):
        plan = pellucid.compile_plan(sampler, schedule=parts.schedule, target=parts.target, steps=8)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error")
            x = pellucid.run(plan, denoise, shape=shape, seeds=range(4))
        assert x.square().mean() < 1.5
