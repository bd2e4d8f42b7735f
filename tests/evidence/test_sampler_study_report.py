"""The figures and the report of a sampler study: KID in pairs, prompts drawn again, scenes that are known, files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oracle_pipe import OraclePipe, subject
from PIL import Image
from stand_ins import Small
from tiny_scenes import draw

from pellucid import scenes
from pellucid.core.errors import PellucidError
from pellucid.evidence.metrics.images import Pixels
from pellucid.evidence.metrics.kid import kid_exact, kid_paired
from pellucid.evidence.study import samplers_report, samplers_results
from pellucid.evidence.study.samplers import (
    InceptionScorer,
    Judges,
    SamplerStudy,
    SamplerStudyConfig,
    SceneScorer,
    pixels_of,
)
from pellucid.evidence.study.samplers_results import LatencyClock
from pellucid.evidence.study.samplers_verdict import SamplerFigures, same_sampler
from pellucid.evidence.study.subject import queries_of

ASKED: dict[str, Any] = {
    "model": "oracle",
    "samplers": ("ddim:karras", "dpmpp_2m:karras", "euler_a:karras"),
    "steps": (3, 5, 9),
    "prompts": tuple(f"prompt {i}" for i in range(12)),
    "seeds": 2,
    "batch": 10,
    "converged_steps": 20,
    "path_steps": 20,
    "rounds": 2,
}


@pytest.fixture(autouse=True)
def no_weights(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine may have in its cache does not count."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path_factory.getbasetemp() / "no-cache"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> SamplerFigures:
    study = SamplerStudy(
        SamplerStudyConfig(**ASKED), tmp_path_factory.mktemp("report") / "study", subject(OraclePipe())
    )
    judges = Judges((InceptionScorer(Small()),), Small(), None, {"image_text": "no CLIP: name one with --clip"})
    study.judges = judges
    study.run()
    LatencyClock(study).run()
    return SamplerFigures(study, judges, resamples=200)


@pytest.fixture(scope="module")
def page(found: SamplerFigures) -> str:
    return samplers_report.write(found).read_text("utf-8")


# --- figures -----------------------------------------------------------------------------------------------------


def test_kid_is_in_pairs_against_the_converged_images(found: SamplerFigures) -> None:
    """From the sheets of images, without the study's features."""
    study, network = found.study, Small()

    def features(cell: Any) -> torch.Tensor:
        parts = [
            pixels_of(study.files.images(cell, first, len(study.config.numbers(first))))
            for first in found.results.firsts
        ]
        return network.features(torch.cat(parts))

    best = features(study.converged[0])
    for cell, value in zip(study.table, found.columns["kid"].values, strict=True):
        assert value == pytest.approx(float(kid_paired(features(cell), best, torch.ones(1, 24))[0]), abs=1e-7)


def test_kid_against_a_reference_is_not_in_pairs(found: SamplerFigures) -> None:
    what = found.judges.scorers[0].what
    reference = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    column = found.results.kid(what, reference)
    assert column.values[0] == pytest.approx(kid_exact(found.results.features(found.cells[0], what), reference))
    assert (column.low <= column.values + 1e-9).all()
    assert (column.values - 1e-9 <= column.high).all()


def test_a_reference_is_measured_once_and_kept(found: SamplerFigures, tmp_path: Path) -> None:
    for i in range(4):
        Image.fromarray(np.full((8, 8, 3), 40 * i, np.uint8)).save(tmp_path / f"{i}.png")
    against = SamplerFigures(found.study, Judges(found.judges.scorers, Small(), str(tmp_path), {}), resamples=20)
    features, statistics = against.reference
    assert features is not None
    assert statistics is not None
    assert len(features) == statistics.count == 4
    assert list((found.study.folder / "features").glob("features-*.safetensors"))
    assert f"against {tmp_path}" in " ".join(against.notes())
    assert not np.allclose(against.columns["kid"].values, found.columns["kid"].values)


def test_fid_only_from_ten_thousand_images_on(found: SamplerFigures, monkeypatch: pytest.MonkeyPatch) -> None:
    what = found.judges.scorers[0].what
    assert "fid" not in found.columns
    assert any("FID needs 10,000 images; here are 24" in note for note in found.notes())
    monkeypatch.setattr(samplers_results, "FEW", 24)
    column = found.results.fid(what)
    assert column is not None
    assert (column.values >= -1e-9).all()
    assert (column.low <= column.values).all()


def test_prompts_are_drawn_again_where_there_are_enough(found: SamplerFigures) -> None:
    """Two images of one prompt always count alike; the interval of a mean is that of the prompts' means."""
    weights = found.results.weights.reshape(200, 12, 2)
    assert torch.equal(weights[:, :, 0], weights[:, :, 1])
    assert (weights[:, :, 0].sum(1) == 12).all()
    held = found.results.per_image(found.cells[0], "pictures", "latent").reshape(12, 2).mean(1)
    drawn = found.columns["latent"].drawn
    assert drawn is not None
    assert drawn[0].std() == pytest.approx(held.std() / math.sqrt(12), rel=0.15)


def test_few_prompts_draw_images(found: SamplerFigures, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers_results, "CLUSTERS", 13)
    fresh = samplers_results.SamplerResults(found.study, 50)
    assert not fresh.by_prompt
    assert (fresh.weights.sum(1) == 24).all()


def test_cells_share_their_resamples(found: SamplerFigures) -> None:
    """Differences between cells are surer than their own intervals: the same images are drawn for all."""
    drawn = found.columns["latent"].drawn
    assert drawn is not None
    apart = drawn[0] - drawn[1]
    assert apart.std() < drawn[0].std()


def test_half_of_a_study_is_reported_over_whole_batches(tmp_path: Path) -> None:
    study = SamplerStudy(SamplerStudyConfig(**ASKED), tmp_path / "study", subject(OraclePipe()), (0, 3))
    study.run()  # the first of three shards
    part = SamplerFigures(study, Judges.open(study), resamples=20)
    assert part.results.count == 10
    assert "unfinished: 10 of 24 images" in samplers_report.headline(part)
    empty = SamplerStudy(SamplerStudyConfig(**ASKED), tmp_path / "empty", subject(OraclePipe()))
    with pytest.raises(PellucidError, match="at least one complete batch"):
        SamplerFigures(empty, Judges())


# --- scenes ------------------------------------------------------------------------------------------------------


class Painter(OraclePipe):
    """Draws the scene of each prompt; with few steps that of the next prompt."""

    def __init__(self, drawn: Any, captions: Sequence[str]) -> None:
        super().__init__()
        self.drawn, self.captions = drawn, list(captions)

    def __call__(self, prompt: Sequence[str] = (), /, *, seed: Sequence[int], **options: Any) -> SimpleNamespace:
        shift = 1 if options["steps"] == 3 else 0
        rows = [(self.captions.index(one) + shift) % len(self.captions) for one in prompt]
        plan = self.plan(options)
        return SimpleNamespace(images=draw(self.drawn[rows]), latents=torch.zeros(len(rows), 3, 2, 2), plan=plan)


def test_scenes_that_are_known_are_read(tmp_path: Path) -> None:
    captions = tuple(caption for caption, _ in scenes.prompts(6))
    drawn = scenes.sample(torch.arange(6), 0, "held_out", ("flat",))
    assert queries_of(captions) is not None
    changes = {"prompts": captions, "seeds": 1, "samplers": ("ddim:karras",), "steps": (3, 5)}
    study = SamplerStudy(SamplerStudyConfig(**ASKED | changes), tmp_path / "study", subject(Painter(drawn, captions)))
    study.judges = judges = Judges.open(study)
    assert [type(scorer) for scorer in judges.scorers] == [SceneScorer]
    study.run()
    found = SamplerFigures(study, judges, resamples=50)
    column = found.columns["right"]
    assert column.values.tolist() == [0.0, 1.0]
    assert column.of_converged == 1.0
    assert column.low[1] == pytest.approx(6 / (6 + 1.959964**2))  # Wilson's, of six right ones of six
    assert (column.low[0], column.high[1]) == (0.0, 1.0)
    assert found.results.attributes(study.table[1])["shape"] == (6, 6)
    samplers_report.write(found)
    assert "What the images show" in (study.folder / "table.md").read_text("utf-8")


def test_other_prompts_are_no_scenes() -> None:
    assert queries_of(["a photograph of a cat"]) is None
    assert queries_of([]) is None


# --- what is left out --------------------------------------------------------------------------------------------


def test_without_judges_it_says_why(found: SamplerFigures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    judges = Judges.open(found.study)
    assert judges.scorers == ()
    assert set(judges.reasons) == {"image_text", "kid", "fid", "right"}
    assert "--inception" in judges.reasons["kid"]
    notes = SamplerFigures(found.study, judges, resamples=20).notes()
    assert any(note.startswith("kid is left out: no Inception weights") for note in notes)
    with pytest.raises(PellucidError, match="--reference must be given with Inception weights"):
        Judges.open(found.study, reference="somewhere")


@pytest.mark.parametrize("by", ["kid", "image_text", "right"])
def test_what_cannot_be_measured_cannot_decide(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    study = SamplerStudy(SamplerStudyConfig(**ASKED | {"by": by}), tmp_path / "study", subject(OraclePipe()))
    with pytest.raises(PellucidError, match="--by must be a measure that can be taken"):
        Judges.open(study)


def test_another_measure_may_decide(found: SamplerFigures) -> None:
    config = SamplerStudyConfig(**ASKED | {"by": "kid"})
    other = SamplerFigures(SamplerStudy(config, found.study.folder, found.study.subject), found.judges, resamples=20)
    assert other.main.measure.name == "kid"
    assert "KID" in other.verdict.sentence


def test_what_a_yardstick_cannot_resolve_is_said(found: SamplerFigures) -> None:
    notes = [note for note in found.notes() if note.startswith("converged: ")]
    assert len(notes) == 2
    assert all("its latents moved by" in note for note in notes)
    assert "2 of 3 distances to it are below 3 times that: not resolved" in notes[1]  # 20 steps of Euler a are few
    assert any("euler_a:karras: stochastic" in note for note in found.notes())
    doubts = found.doubts()
    assert len(doubts) == 1
    assert doubts[0].startswith("Doubtful: euler_a:exponential with 20 steps")
    assert "2 of 3 distances to it are not resolved. Give more --path-steps." in doubts[0]
    assert samplers_report.plain(found)["doubts"] == doubts


def test_two_names_for_one_sampler_are_said(found: SamplerFigures, tmp_path: Path) -> None:
    asked = ASKED | {"samplers": ("ddim:karras", "dpmpp_2m:karras", "euler:karras"), "prompts": ("a", "b")}
    study = SamplerStudy(SamplerStudyConfig(**asked), tmp_path / "study", subject(OraclePipe()))
    study.run()
    twins = [note for note in SamplerFigures(study, Judges(), resamples=20).notes() if "same images" in note]
    assert len(twins) == 1
    assert twins[0].startswith("ddim:karras and euler:karras make the same images")
    assert not any("same images" in note for note in found.notes())


def test_rounding_that_moves_a_few_images_far_makes_no_second_sampler() -> None:
    """As DDIM and Euler on a GPU: 0.1 % apart in the median, 40 % in one image."""
    random = np.random.default_rng(0)
    far = random.lognormal(-2, 1, 500)
    moved = far * (1 + 2e-3 * random.standard_normal(500))
    moved[7] *= 1.4
    assert same_sampler(far, moved)
    assert not same_sampler(far, far * random.uniform(0.95, 1.15, 500))
    assert not same_sampler(far, far[:-1])


# --- files -------------------------------------------------------------------------------------------------------


def test_the_page_is_whole(found: SamplerFigures, page: str) -> None:
    assert found.verdict.sentence.replace(">", "&gt;") in page
    for cell in found.cells:
        assert page.count(f'data-cell="{cell.key}"') >= 4  # in charts, as a button and with its images
    assert page.count('data-cell="converged"') == 2
    assert page.count('class="chart"') == 5  # three measures and both times
    assert 'src="data:image/jpeg' in page
    assert "https://" not in page


def test_charts_are_images_too(found: SamplerFigures, page: str) -> None:
    names = {path.name for path in (found.study.folder / "charts").iterdir()}
    assert names == {
        "distance_calls.png",
        "latent_calls.png",
        "kid_calls.png",
        "distance_seconds.png",
        "seconds_calls.png",
    }
    for name in names:
        with Image.open(found.study.folder / "charts" / name) as image:
            assert len(image.getcolors(2**20) or ()) > 20


def test_results_for_programs(found: SamplerFigures, page: str) -> None:
    held = json.loads((found.study.folder / "results.json").read_text("utf-8"))
    assert [(row["sampler"], row["steps"], row["nfe"]) for row in held["cells"]] == [
        (cell.setup.text, cell.steps, cell.nfe) for cell in found.cells
    ]
    for row in held["cells"]:
        for name in ("distance", "latent", "kid"):
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]
        assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    assert held["knee"]["cell"] in held["front"]
    assert held["recommendation"]["call"]["sampler"] in held["knee"]["cell"]
    assert held["ranking"][0]["sampler"] == "dpmpp_2m:karras"
    assert sum(held["knee"]["share_of_resamples"].values()) == pytest.approx(1)


def test_where_no_knee_was_found_none_is_reported(found: SamplerFigures) -> None:
    def marks(figures: SamplerFigures) -> list[str]:
        axis = samplers_report.Axis("model calls (NFE)", True)
        drawn = samplers_report.curve(figures, figures.main, axis, [float(c.nfe) for c in figures.cells])
        return [mark.name for mark in drawn.marks]

    assert found.verdict.knee.found
    assert "knee" in marks(found)
    taken = found.verdict.knee.cell
    other = SamplerFigures(found.study, found.judges, resamples=20)
    vars(other)["verdict"] = replace(found.verdict, knee=replace(found.verdict.knee, beyond="more"))
    assert samplers_report.plain(other)["knee"] is None
    assert "knee" not in marks(other)
    assert samplers_report.main_table(other).rows[taken][-1] == "front"


def test_images_that_are_not_finite_are_on_no_front(found: SamplerFigures) -> None:
    column = found.columns["distance"]
    assert np.isfinite(column.values).all()
    held = found.results.files.records.by_name[found.cells[0].key, 0, "pictures"]
    kept = held["distance"]
    try:
        held["distance"] = [None, *kept[1:]]
        broken = SamplerFigures(found.study, found.judges, resamples=20)
        broken.results.files.records.by_name[found.cells[0].key, 0, "pictures"] = held
        assert math.isnan(broken.columns["distance"].values[0])
        assert 0 not in broken.verdict.by_calls
        assert any("not finite" in note for note in broken.notes())
        json.dumps(samplers_report.plain(broken), allow_nan=False)
        samplers_report.all_charts(broken)
    finally:
        held["distance"] = kept


def test_features_of_a_set_are_those_of_its_images(found: SamplerFigures) -> None:
    """What the scorer kept in files, against the metric's own way from images to features."""
    what, cell = found.judges.scorers[0].what, found.cells[2]
    held = found.study.files.images(cell, 0, 10)
    (chunk,) = Pixels(pixels_of(held)).chunks(lambda *_: None)
    assert torch.allclose(found.study.files.features(cell, 0, what), Small().features(chunk), atol=1e-6)
