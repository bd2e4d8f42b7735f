"""The report of a schedule study: Student's t against scipy, verdicts in words, charts and tables of made-up runs."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from PIL import Image

from pellucid.core.errors import PellucidError
from pellucid.evidence.statistics import Estimate, between, in_words, t_interval, t_quantile
from pellucid.evidence.study import schedules_report
from pellucid.evidence.study.schedules import ScheduleResults, ScheduleStudyConfig
from pellucid.train.config import to_plain
from pellucid.train.objective import ByLevel

ROOT = Path(__file__).parents[2]
LOADED = ScheduleStudyConfig.load(ROOT / "configs" / "cifar10_schedules.toml")
FULL = replace(
    LOADED,
    train={**LOADED.train, "batch": 512, "ema": [500_000.0, 250_000.0]},
    schedules=("linear", "cosine", "sqrt_alpha_bar"),
    points=(2000, 5000, 10_000, 15_000),
    seeds=(0,),
    samples=10_000,
    final_samples=50_000,
    grids=("leading",),
)
SEEDS = replace(FULL, seeds=(0, 1, 2), final_samples=10_000)
BEST = {"linear": 14.0, "cosine": 11.0, "sqrt_alpha_bar": 19.0}  # FID at the end of the made-up runs


def made_up(folder: Path, study: ScheduleStudyConfig, only: int | None = None) -> Path:
    """A study's folder as if it had run, up to `only` scores; the numbers are smooth curves and a little chance."""
    random = np.random.default_rng(0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_plain(study), indent=1, sort_keys=True))
    (folder / "pictures").mkdir()
    rows: list[dict[str, Any]] = []
    for seed in study.seeds:
        for name in study.schedules:
            if only is not None and len(rows) >= only:
                break
            rows += scores(study, name, seed, random)
            log(folder / "runs" / f"{name}-{seed}", study, name, random)
            for step in study.points:
                noise = random.normal(0, 300 / math.sqrt(step), (65, 65, 3))
                rising = np.linspace(60, 190, 65)[:, None, None]
                pixels = np.clip(rising + noise, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "pictures" / f"{name}-{seed}-{step:08d}.png")
    text = "".join(json.dumps(row) + "\n" for row in rows[:only])
    (folder / "records.jsonl").write_text(text)
    return folder


def scores(study: ScheduleStudyConfig, name: str, seed: int, random: np.random.Generator) -> Iterator[dict[str, Any]]:
    own = study.own
    for step in study.points:
        for i, cell in enumerate(study.cells(name, seed, step)):
            last = step == study.points[-1] and (cell.ema, cell.grid) == own
            fid = BEST[name] * (15_000 / step) ** 0.8 * (1 + 0.05 * i) + random.normal(0, 0.3)
            row = {**cell._asdict(), "images": step * 512, "samples": study.samples, "fid": fid + 1.8}
            row |= {
                "kid": fid * 8e-4,
                "kid_low": fid * 7.6e-4,
                "kid_high": fid * 8.4e-4,
                "precision": 0.6,
                "recall": 0.5,
            }
            if step == study.points[-1]:
                row["kid_last_call"] = fid * 1e-4
            if last:
                row |= {"samples": study.final_samples, "fid": fid, "fid_low": fid - 0.2, "fid_high": fid + 0.25}
                row |= {"fid_few": fid + 1.8} if study.samples < study.final_samples else {}
            yield row


def log(folder: Path, study: ScheduleStudyConfig, name: str, random: np.random.Generator) -> None:
    """Windows of a hundred steps, with the levels that the schedule would visit."""
    folder.mkdir(parents=True)
    objective = study.task(name).objective.build()
    lam = -np.log(objective.schedule.ratio_at(np.arange(1000))).clip(-7.9, 7.9)
    edges = ByLevel().edges.numpy()
    counted, _ = np.histogram(lam, edges)
    middles = (edges[:-1] + edges[1:]) / 2
    levels = [
        {"lam": m, "count": 51.2 * c, "mean": 1 / (1 + math.exp(-1.1 * (m - 1))) + 1e-3, "std": 0.1}
        for m, c in zip(middles.tolist(), counted.tolist(), strict=True)
        if c
    ]
    with (folder / "log.jsonl").open("w") as file:
        for step in range(100, study.points[-1] + 1, 100):
            loss = 0.03 * BEST[name] / 11 + 0.4 * math.exp(-step / 400) + random.normal(0, 1e-4)
            norm = 0.1 + 0.8 * math.exp(-step / 700) + abs(random.normal(0, 5e-3))
            line = {
                "step": step,
                "images": step * 512,
                "loss": loss,
                "loss_std": loss * 0.05 * random.uniform(0.7, 1.3),
            }
            line |= {"grad_norm": norm, "grad_norm_std": norm * random.uniform(0.2, 0.4), "rate": 6e-4}
            file.write(json.dumps(line | {"levels": levels, "images_per_s": 12_000.0}) + "\n")
        file.write('{"step": 151')  # a killed run


# --- significance


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 30, 199])
@pytest.mark.parametrize("part", [0.5, 0.6, 0.9, 0.975, 0.9999])
def test_student_quantiles_are_those_of_scipy(part: float, degrees: int) -> None:
    assert t_quantile(part, degrees) == pytest.approx(scipy.stats.t.ppf(part, degrees), rel=1e-11, abs=1e-12)


@pytest.mark.parametrize(("part", "degrees"), [(0.4, 3), (1.0, 3), (0.9, 0)])
def test_student_quantiles_refuse_what_has_none(part: float, degrees: int) -> None:
    with pytest.raises(PellucidError, match="part, degrees must be"):
        t_quantile(part, degrees)


def test_seeds_are_paired() -> None:
    """The interval is that of scipy's paired test: seeds that move both schedules alike cost nothing."""
    a, b = [11.0, 14.0, 17.1], [10.0, 12.9, 16.2]
    found = between([Estimate(value) for value in a], [Estimate(value) for value in b])
    expected = scipy.stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-9)
    assert found.significant
    assert found.over == "seeds"
    apart = scipy.stats.ttest_ind(a, b).confidence_interval(0.95)
    assert apart.low < 0 < apart.high


def test_a_t_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(3)
    hits = [abs(mean - 5.0) <= half for mean, half in (t_interval(list(random.normal(5, 2, 3))) for _ in range(4000))]
    assert np.mean(hits) == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / 4000))


def test_single_runs_are_told_apart_by_their_intervals() -> None:
    """Of symmetric intervals the difference has the root of the sum of squares; of skewed ones, each side its own."""
    found = between([Estimate(10.0, 9.7, 10.3)], [Estimate(11.0, 10.6, 11.4)])
    assert (found.low, found.high) == pytest.approx((-1.5, -0.5))
    assert found.over == "images"
    skewed = between([Estimate(10.0, 9.9, 10.3)], [Estimate(11.0, 10.6, 11.2)])
    assert skewed.low == pytest.approx(-1 - math.hypot(0.1, 0.2))
    assert skewed.high == pytest.approx(-1 + math.hypot(0.3, 0.4))
    unknown = between([Estimate(10.0)], [Estimate(11.0, 10.6, 11.2)])
    assert unknown.significant is None
    with pytest.raises(PellucidError, match="equally many of each, at least one"):
        between([Estimate(1.0)], [])


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Estimate(-1.2, -1.5, -0.9, "seeds", 3), "a is better than b by 1.20 ± 0.30 FID (significant over 3 seeds)."),
        (Estimate(1.2, 0.9, 1.5, "seeds", 3), "b is better than a by 1.20 ± 0.30 FID (significant over 3 seeds)."),
        (Estimate(-0.1, -0.5, 0.3, "seeds", 3), "a and b are not distinguishable: apart by 0.10 ± 0.40 FID (over"),
        (Estimate(-1.2, -1.6, -0.9, "images", 1), "a is better than b by 1.20 (0.90 to 1.60) FID (significant"),
        (Estimate(0.1, -0.2, 0.5, "images", 1), "b and a are not distinguishable: apart by 0.10 (−0.20 to 0.50)"),
        (Estimate(-1.2, over="none"), "a is ahead of b by 1.20 FID (one run each, no interval known)."),
    ],
)  # fmt: skip
def test_differences_in_words(found: Estimate, words: str) -> None:
    assert in_words("a", "b", found, "FID").startswith(words)


def test_words_are_in_the_unit_of_the_metric() -> None:
    said = in_words("a", "b", Estimate(-2e-3, -3e-3, -1e-3, "seeds", 3), "KID × 10³", 1e3)
    assert "by 2.00 ± 1.00 KID × 10³" in said


# --- reports


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schedules_report.write(made_up(tmp_path_factory.mktemp("one") / "study", FULL)).parent


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return schedules_report.write(made_up(tmp_path_factory.mktemp("three") / "study", SEEDS)).parent


def test_a_report_is_one_file_that_needs_nothing(one_seed: Path) -> None:
    page = (one_seed / "report.html").read_text("utf-8")
    inlined = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    stored = {path.stem: path.read_bytes() for path in (one_seed / "charts").glob("*.png")}
    assert set(stored) == {"quality", "levels", "stability", "pictures"}
    assert [base64.b64decode(image) for image in inlined] == [stored["pictures"]]  # whose pixels stay whole
    assert page.count("<svg ") == 3
    assert not re.search(r"https?://|src=\"(?!data:)|href=\"(?!#)", page)
    assert "cosine is better than linear by" in page
    assert not list(one_seed.rglob("*.part*"))


def test_a_table_says_what_the_records_say(one_seed: Path) -> None:
    rows = [json.loads(line) for line in (one_seed / "records.jsonl").read_text().splitlines()]
    [row] = [row for row in rows if row["schedule"] == "cosine" and "fid_low" in row]
    shown = f"{row['fid']:.2f} ({row['fid_low']:.2f} to {row['fid_high']:.2f})"
    text = (one_seed / "table.md").read_text("utf-8")
    assert re.search(rf"\| cosine \| 15,000 \| 50,000 \| {re.escape(shown)} \|", text)
    assert re.search(rf"\| cosine \|.* \| 0\.500 \| {row['kid_last_call'] * 1e3:.2f} \|", text)
    assert f"| {row['fid_few']:.2f} |" in text  # of 10,000 images, beside the points before
    table = json.loads((one_seed / "table.json").read_text("utf-8"))
    assert table["schedules"]["cosine"]["last"] == [row]
    assert table["schedules"]["cosine"]["seconds"] == pytest.approx(15_000 * 512 / 12_000)
    assert table["cells"] == {"scored": 18, "wanted": 18}
    assert {(c["a"], c["b"], c["metric"]) for c in table["comparisons"]} >= {("linear", "cosine", "fid")}


def test_curves_compare_fid_of_one_count(one_seed: Path) -> None:
    """The last FID is of 50,000 images, those before of 10,000: the curve takes the 10,000, the mark the rest."""
    found = ScheduleResults.read(one_seed)
    [final] = found.at("linear", 15_000).values()
    assert found.curve("linear", "fid")[-1].values == (final["fid_few"],)
    mark = found.final("linear")
    assert mark is not None
    assert mark.values == (final["fid"],)
    assert [point.images for point in found.curve("linear", "fid")] == [step * 512 for step in FULL.points]


def test_several_seeds_are_means_and_paired_differences(three_seeds: Path) -> None:
    found = ScheduleResults.read(three_seeds)
    last = {name: [row["fid"] for row in found.at(name, 15_000).values()] for name in SEEDS.schedules}
    apart = found.difference("linear", "cosine", "fid")
    assert apart is not None
    expected = scipy.stats.ttest_rel(last["linear"], last["cosine"]).confidence_interval(0.95)
    assert (apart[1].low, apart[1].high) == pytest.approx((expected.low, expected.high))
    mean, deviation = np.mean(last["cosine"]), np.std(last["cosine"], ddof=1)
    text = (three_seeds / "table.md").read_text("utf-8")
    assert f"| {mean:.2f} ± {deviation:.2f} |" in text
    assert "significant over 3 seeds" in text
    assert found.final("cosine") is None  # as many images at the end as before


@pytest.mark.parametrize("scored", [0, 14])
def test_an_unfinished_study_has_a_report(tmp_path: Path, scored: int) -> None:
    folder = made_up(tmp_path / "study", replace(SEEDS, inception="<script>alert(1)</script>"), only=scored)
    page = schedules_report.write(folder).read_text("utf-8")
    assert f"unfinished: {scored} of 54 scores" in page
    assert page.count('<figure class="chart') == 4
    assert page.count("<script") == 1
    assert "<script>alert" not in page  # markup in a config stays text
    compared = json.loads((folder / "table.json").read_text("utf-8"))["comparisons"]
    assert len(compared) == {0: 0, 14: 6}[scored]
    if scored == 14:
        assert "At step 5,000: linear is ahead of sqrt_alpha_bar" in page


def test_the_end_of_training_is_its_last_tenth(one_seed: Path) -> None:
    lines = (one_seed / "runs" / "cosine-0" / "log.jsonl").read_text().splitlines()[:-1]
    losses = [json.loads(line)["loss"] for line in lines]
    assert ScheduleResults.read(one_seed).at_end("cosine", "loss") == pytest.approx(np.mean(losses[-15:]))


@pytest.mark.parametrize("name", FULL.schedules)
def test_the_density_of_training_times_is_one(one_seed: Path, name: str) -> None:
    """Drawn as the schedule's own table has it: half of the times on either side of the λ of its middle."""
    found = ScheduleResults.read(one_seed)
    lam = found.trained_at(name)
    curve = found.study.task(name).objective.build().schedule
    assert np.median(lam) == pytest.approx(-math.log(curve.ratio_at(499.5)), abs=0.01)
    _, height = schedules_report.spread_of(lam)
    assert height.sum() * schedules_report.BIN == pytest.approx(1.0, abs=2e-3)  # one of 1,000 times lies beyond


def test_levels_that_were_not_seen_are_gaps() -> None:
    lam, mean = schedules_report.with_gaps(np.array([-7.5, -3.5, -2.5]), np.array([1.0, 2.0, 3.0]))
    assert np.isnan(lam).tolist() == [False, True, False, False]
    assert mean[[0, 2, 3]].tolist() == [1.0, 2.0, 3.0]


def test_a_folder_without_a_study_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match=r"must be one that holds config\.json"):
        schedules_report.write(tmp_path)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(PellucidError, match="must be JSON"):
        schedules_report.write(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["config.json"]
