"""The interaction study: budgets, gaps and changes by hand, and models whose best samplers are known to differ."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from pellucid import PellucidError, compile_plan, oracle, run
from pellucid.cli import app, study
from pellucid.core import schedule as schedules
from pellucid.core.schedule import Schedule
from pellucid.evidence.study import interaction_report
from pellucid.evidence.study.interaction import (
    JUDGED,
    InteractionResults,
    InteractionStudy,
    InteractionStudyConfig,
    ModelResult,
    label_of,
)
from pellucid.evidence.study.kernel import run_study
from pellucid.evidence.study.samplers import DecidingMeasure
from pellucid.evidence.study.samplers_results import MEASURES, Column
from pellucid.evidence.study.setups import SamplerCell, SamplerSetup
from pellucid.evidence.study.subject import Subject

# --- by hand ---------------------------------------------------------------------------------------------------

A, B, TWICE = SamplerSetup("ddim"), SamplerSetup("dpmpp_2m", "karras"), SamplerSetup("heun")


def model(
    name: str, group: str, values: dict[SamplerCell, float], spread: float = 0.01, measure: str = "distance"
) -> ModelResult:
    """A model whose figures are these, each resampled with a little noise of its own."""
    random = np.random.default_rng(sum(map(ord, name)))
    held = np.array(list(values.values()))
    drawn = held[:, None] * np.exp(spread * random.standard_normal((len(held), 400)))
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
    return ModelResult(
        name, group, "eps", "UNet", tuple(values), Column(MEASURES[measure], held, low, high, drawn), 0.0
    )


def cells(a: float, b: float, steps: int = 10) -> dict[SamplerCell, float]:
    return {SamplerCell(A, steps, steps): a, SamplerCell(B, steps, steps): b}


def test_a_budget_takes_the_most_calls_that_fit() -> None:
    held = {
        SamplerCell(A, 5, 5): 0.5,
        SamplerCell(A, 10, 10): 0.3,
        SamplerCell(TWICE, 5, 9): 0.2,
        SamplerCell(TWICE, 10, 19): 0.01,
    }
    one = model("m", "linear", held)
    found = InteractionResults([one], [5, 10])
    assert found.cell(one, "heun", 5) is None
    assert found.cell(one, "heun", 10) == 2  # 19 calls do not fit into 10, 9 do
    assert found.cell(one, "ddim", 10) == 1
    best = found.best(one, 10)
    assert (best.setup, best.figure.value, best.first, best.rivals) == ("heun", 0.2, 1.0, ())
    assert found.best(one, 5).setup == "ddim"


def test_what_cannot_be_told_from_the_best_is_named() -> None:
    one = model("m", "linear", cells(0.100, 0.1001, 10), spread=0.05)
    best = InteractionResults([one], [10]).best(one, 10)
    assert best.setup == "ddim"
    assert best.rivals == ("dpmpp_2m:karras",)
    assert 0.3 < best.first < 0.7


def test_a_cell_that_is_not_finite_is_never_the_best() -> None:
    one = model("m", "linear", cells(math.nan, 0.2))
    found = InteractionResults([one], [10])
    assert found.best(one, 10).setup == "dpmpp_2m:karras"
    assert found.best_of(one.group, 10) == "dpmpp_2m:karras"


def test_a_change_over_models_is_students() -> None:
    """Three runs of each schedule; factors of a over b of 2, 2.2 and 1.8 in one and the reverse in the other."""
    factors = (2.0, 2.2, 1.8)
    here = [model(f"l{i}", "linear", cells(0.1, 0.1 * f)) for i, f in enumerate(factors)]
    there = [model(f"c{i}", "cosine", cells(0.3 * f, 0.3)) for i, f in enumerate(factors)]
    (change,) = InteractionResults([*here, *there], [10]).changes()
    assert (change.best_here, change.best_there, change.sure) == ("ddim", "dpmpp_2m:karras", True)
    assert change.kept_there.over == "models"
    logs = np.log(factors)
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    for gap in (change.kept_there, change.kept_here):
        assert (gap.value, gap.low, gap.high) == pytest.approx(
            (math.exp(logs.mean()), math.exp(low), math.exp(high)), rel=1e-6
        )


def test_a_change_that_one_run_contradicts_is_not_sure() -> None:
    here = [model(f"l{i}", "linear", cells(0.1, 0.1 * f)) for i, f in enumerate((2.0, 2.2, 0.6))]
    there = [model(f"c{i}", "cosine", cells(0.3 * f, 0.3)) for i, f in enumerate((2.0, 2.2, 1.8))]
    (change,) = InteractionResults([*here, *there], [10]).changes()
    assert not change.sure
    assert "not sure" in interaction_report.change_words(InteractionResults([*here, *there], [10]), change)


def test_single_models_are_judged_over_images() -> None:
    for spread, sure in ((0.01, True), (0.5, False)):
        pair = [model("l", "linear", cells(0.1, 0.12), spread), model("c", "cosine", cells(0.12, 0.1), spread)]
        (change,) = InteractionResults(pair, [10]).changes()
        assert change.kept_here.over == "images"
        assert change.sure == sure
        assert change.kept_here.value == pytest.approx(1.2)


def test_no_change_where_the_best_is_the_same() -> None:
    pair = [model("l", "linear", cells(0.1, 0.12)), model("c", "cosine", cells(0.5, 0.9))]
    found = InteractionResults(pair, [10])
    assert found.changes() == []
    assert interaction_report.sentences(found) == [
        "The best sampler is the same in all groups at every number of model calls."
    ]


def test_nothing_is_sure_below_what_the_yardstick_moves() -> None:
    """The same figures, with a converged run that is as far off as they are."""
    pair = [model("l", "linear", cells(0.1, 0.12)), model("c", "cosine", cells(0.12, 0.1))]
    assert InteractionResults(pair, [10]).changes()[0].sure
    vague = InteractionResults([pair[0], replace(pair[1], floor=0.05)], [10])
    assert not vague.changes()[0].sure
    assert [vague.best(one, 10).resolved for one in vague.seen] == [True, False]
    (words,) = interaction_report.about_converged(vague)
    assert "c: its converged run still moved by 0.05" in words


def test_where_more_is_better_the_largest_wins() -> None:
    one = model("m", "linear", cells(0.4, 0.7), measure="right")
    found = InteractionResults([one], [10])
    assert found.best(one, 10).setup == "dpmpp_2m:karras"
    assert found.gap(one.group, "ddim", "dpmpp_2m:karras", 10).value == pytest.approx(0.3)
    assert found.nothing == 0.0


def test_effects_are_those_of_a_two_way_table() -> None:
    """A pure product has no interaction; a swapped pair has nothing else."""
    product = [model("l", "linear", cells(0.1, 0.2)), model("c", "cosine", cells(0.3, 0.6))]
    sampler, group, both = InteractionResults(product, [10]).spreads(10)
    assert (sampler, group, both) == pytest.approx((math.sqrt(2), math.sqrt(3), 1.0))
    swapped = [model("l", "linear", cells(0.1, 0.2)), model("c", "cosine", cells(0.2, 0.1))]
    assert InteractionResults(swapped, [10]).spreads(10) == pytest.approx((1.0, 1.0, math.sqrt(2)))
    assert InteractionResults(product[:1], [10]).spreads(10) is None


# --- models whose truth is known -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exact:
    """Called as a pipeline is: an exact denoiser of 48 numbers, of which an image of 4 × 4 is made."""

    schedule: Schedule
    mixture: oracle.Mixture

    def __call__(self, n: int, seed: list[int], sampler: str, steps: int, noise: Any, **how: Any) -> Any:
        options = how.get("options", {})
        plan = compile_plan(sampler, schedule=self.schedule, grid=how.get("grid"), steps=steps, **options)
        x = run(plan, self.mixture, shape=(3, 4, 4), seeds=seed, noise=noise, dtype=torch.float64)
        bytes_ = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        return SimpleNamespace(images=[Image.fromarray(one) for one in bytes_], latents=x, plan=plan)


def subject(name: str, schedule: str) -> Subject:
    curve = schedules.make(schedule)
    mixture = oracle.smooth(dim=48)
    return Subject(Exact(curve, mixture), name, curve, curve.carries[0], f"mark of {name}", "nothing")


CONFIG = {
    "models": ("a/model", "b/model"),
    "samplers": ("dpmpp_2m:karras", "dpmpp_2m:trailing", "heun:karras"),
    "steps": (5, 10),
    "seeds": 12,
    "batch": 12,
    "converged": "ipndm:kl_optimal",
    "converged_steps": 60,
    "path_steps": 60,
    "by": "latent",
}
PIPES = {"a": subject("a", "linear"), "b": subject("b", "cosine")}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[InteractionResults, Path]:
    folder = tmp_path_factory.mktemp("interaction") / "study"
    return run_study(InteractionStudy, InteractionStudyConfig(**CONFIG), folder, pipes=PIPES), folder


def test_the_karras_grid_is_for_linear_and_not_for_cosine(found: tuple[InteractionResults, Path]) -> None:
    """Karras spends its steps where cosine's noise is a thousand times the data: known from the exact flow."""
    study, _ = found
    assert [one.group for one in study.seen] == ["linear, eps, Exact", "cosine, eps, Exact"]
    assert study.best_of("linear, eps, Exact", 5) == "dpmpp_2m:karras"
    assert study.best_of("cosine, eps, Exact", 5) == "dpmpp_2m:trailing"
    change = study.changes()[0]
    assert (change.budget, change.sure) == (5, True)
    assert change.kept_there.value > 5


def test_distances_are_to_the_exact_flow(found: tuple[InteractionResults, Path]) -> None:
    """The converged run is the flow, so the study's distances are those of the oracle study's kind."""
    study, _ = found
    one = study.seen[0]
    assert one.floor < 0.1 * one.column.values.min()
    number = study.cell(one, "dpmpp_2m:trailing", 10)
    plan = compile_plan("dpmpp_2m", schedule="linear", grid="trailing", steps=10)
    fine = compile_plan("dpmpp_3m", schedule="linear", grid="karras", steps=400)
    ends = [
        run(p, PIPES["a"].pipe.mixture, shape=(3, 4, 4), seeds=list(range(12)), dtype=torch.float64)
        for p in (plan, fine)
    ]
    wanted = (ends[0] - ends[1]).flatten(1).square().mean(1).sqrt().mean()
    assert one.column.values[number] == pytest.approx(float(wanted), rel=0.05)


def test_the_report_says_it_all(found: tuple[InteractionResults, Path]) -> None:
    _, folder = found
    for name in ("report.html", "table.md", "figures.json", "charts/heat.png", "charts/a.png", "charts/b.png"):
        assert (folder / name).stat().st_size > 500, name
    figures = json.loads((folder / "figures.json").read_text("utf-8"))
    assert figures["changes"][0]["sure"]
    assert {row["setup"] for row in figures["best_of_groups"]} >= {"dpmpp_2m:karras", "dpmpp_2m:trailing"}
    page = (folder / "report.html").read_text("utf-8")
    assert "a sure change" in page
    assert ">5 calls</text>" in page
    assert "times the distance of each model's best" in page
    assert "At 5 calls dpmpp_2m:karras is best for linear" in (folder / "table.md").read_text("utf-8")


def test_a_study_goes_on_and_refuses_another(found: tuple[InteractionResults, Path]) -> None:
    study, folder = found
    before = (folder / "models" / "a" / "records.jsonl").read_bytes()
    again = run_study(InteractionStudy, InteractionStudyConfig(**CONFIG), folder, pipes=PIPES)
    assert (folder / "models" / "a" / "records.jsonl").read_bytes() == before
    assert again.changes() == study.changes()
    with pytest.raises(PellucidError) as refused:
        run_study(InteractionStudy, InteractionStudyConfig(**{**CONFIG, "seed": 1}), folder, pipes=PIPES)
    assert refused.value.code == "resume-config"
    more = InteractionStudyConfig(**{**CONFIG, "samplers": (*CONFIG["samplers"], "unipc:trailing")})
    wider = run_study(InteractionStudy, more, folder, pipes=PIPES)
    assert "unipc:trailing" in wider.setups
    assert (folder / "models" / "a" / "records.jsonl").read_bytes().startswith(before)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    config = InteractionStudyConfig(**CONFIG)
    for text, code in (
        ("{}", "study-folder"),
        ("no", "study-folder"),
        (InteractionStudy(config, tmp_path / "none").text.replace("1,", "9,", 1), "study-version"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(PellucidError) as refused:
            InteractionStudy(config, tmp_path)
        assert refused.value.code == code
    (tmp_path / "config.json").rename(tmp_path / "letters.txt")
    with pytest.raises(PellucidError, match="--out must be empty"):
        InteractionStudy(config, tmp_path)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"models": ()}, "models must be at least one"),
        ({"models": ("x/a", "y/a")}, "names must be different"),
        ({"names": ("one",)}, "names must be one per model, 2"),
        ({"names": ("one", "../two")}, "names must be different, of letters"),
        ({"samplers": ("dance",)}, "sampler must be a known name"),
        ({"steps": ()}, "steps must be at least one"),
        ({"by": "beauty"}, "by must be one of distance, latent, kid, image_text, right; got"),
        ({"prompts": "nowhere.txt"}, "prompts must be a text file that exists"),
        ({"converged_steps": 11}, "converged_steps must be at least twice"),
    ],
)
def test_a_wrong_config_is_one_line(change: dict, line: str) -> None:
    with pytest.raises(PellucidError) as refused:
        InteractionStudyConfig(**{**CONFIG, **change})
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_measure_that_is_offered_can_decide() -> None:
    """Help and page name what a config takes; FID, which has no resamples in common, is not among it."""
    option = get_type_hints(study.study_interaction, include_extras=True)["by"].__metadata__[0]
    page = (Path(__file__).parents[2] / "docs/study_interaction.md").read_text("utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `--by` |"))
    for by in get_args(DecidingMeasure):
        InteractionStudyConfig(**{**CONFIG, "by": by})
    assert option.help.removeprefix("What decides: ").partition(" (")[0].split(", ") == list(get_args(DecidingMeasure))
    assert set(re.findall(r"`(\w+)`", row)) == set(get_args(DecidingMeasure))
    assert set(JUDGED) <= set(get_args(DecidingMeasure))


def test_a_model_is_named_by_its_folder() -> None:
    assert label_of("data/runs/linear-0/model") == "linear-0"
    assert label_of("scenes-128") == "scenes-128"
    assert label_of("scenes-128/dit") == "dit"


def refused(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        app(["study", "interaction", *args])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_the_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "CONFIG or --models must be given" in refused([], capsys)
    words = ["--models", "a", "--samplers", "ddim", "--steps", "ten"]
    assert "--steps must be whole numbers" in refused(words, capsys)
    path = tmp_path / "study.toml"
    path.write_text('models = ["a", "b"]\nsamplers = ["ddim"]\nsteps = [5]\nsamplerz = 3\n')
    assert "samplerz must be a known key" in refused([str(path)], capsys)
    path.write_text('models = ["a", "b"]\nsamplers = ["ddim"]\nsteps = [5]\n')
    assert "--seeds must be left to the config" in refused([str(path), "--seeds", "4"], capsys)
    assert "model must be a folder" in refused([str(path), "--out", str(tmp_path / "out")], capsys)
