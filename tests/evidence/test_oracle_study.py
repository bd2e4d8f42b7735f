"""The study of oracles: its truths are true, its budgets are kept, its orders are the registry's, and it goes on."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from scipy import stats

from pellucid import Level, PellucidError, compile_plan, oracle, run, samplers
from pellucid.cli import app
from pellucid.core.schedule import make
from pellucid.evidence.study import oracle as truth
from pellucid.evidence.study import oracle_orders, oracle_report
from pellucid.evidence.study.oracle import (
    GRIDS,
    NFE,
    SAMPLERS,
    OracleBench,
    OracleResults,
    OracleStudy,
    OracleStudyConfig,
    agreement,
    changes,
    distinct_grids,
    fitting_plan,
    same_levels,
)
from pellucid.evidence.study.setups import SamplerSetup, entry_of, setup_without_grid

SMALL = {"samplers": ("ddim", "euler", "heun", "dpmpp_2m", "euler_a"), "grids": ("karras", "trailing"), "nfe": (4, 8)}
QUICK = {**SMALL, "schedules": ("edm",), "points": 32, "orders": False}


def single(mean: float, spread: float, dim: int = 3) -> oracle.Mixture:
    one = torch.ones(1, dtype=torch.float64)
    return oracle.Mixture(torch.full((1, dim), mean, dtype=torch.float64), one * spread, one)


# --- the truth -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [10.0, math.inf])
def test_the_flow_of_one_gaussian_is_a_scaling(top: float) -> None:
    """x − alpha·mean keeps its place in units of its standard deviation √(alpha²·spread² + sigma²)."""
    mixture = single(0.7, 0.4)
    noise = truth.starting_noise(mixture, 32, 0)
    scaled = noise if math.isinf(top) else (top * noise - 0.7) / math.hypot(0.4, top)
    wanted = 0.7 + 0.4 * scaled
    assert torch.allclose(truth.exact_flow(mixture, noise, top), wanted, atol=1e-8)


def test_half_the_pace_changes_nothing_that_is_measured() -> None:
    mixture = oracle.sharp()
    noise = truth.starting_noise(mixture, 64, 0)
    once, twice = (truth.exact_flow(mixture, noise, 80.0, pace) for pace in (truth.FLOW_PACE, truth.FLOW_PACE / 2))
    assert oracle.distance(once, twice) < 1e-6


def test_many_steps_of_a_sampler_reach_the_exact_flow() -> None:
    """From noise alone at the schedule's top to a clean x, also from pure noise."""
    mixture = oracle.smooth()
    for schedule in ("edm", "flow"):
        curve = make(schedule)
        noise = truth.starting_noise(mixture, 32, 0)
        plan = compile_plan("heun", schedule=curve, steps=250)
        found = run(plan, truth.Cloud(mixture), (noise * plan.initial_scale)[None])[0]
        assert oracle.distance(found, truth.exact_flow(mixture, noise, truth.top_of(curve))) < 1e-3, schedule


def test_quantiles_are_those_of_the_mixture() -> None:
    mixture = single(1.0, 0.5, dim=2)
    found = truth.quantiles(mixture, torch.tensor([0.6, 0.8], dtype=torch.float64), 100)
    wanted = stats.norm(1.4, 0.5).ppf((torch.arange(100, dtype=torch.float64) + 0.5) / 100)
    assert torch.allclose(found, torch.from_numpy(wanted), atol=1e-5)


def test_the_distance_of_laws_knows_a_shift_and_its_floor() -> None:
    mixture = single(0.0, 1.0)
    law = truth.LawSlices.of(mixture, 4096)
    draws = mixture.sample(4096, torch.Generator().manual_seed(3))
    assert law.distance(draws) < 2 * law.floor(mixture)
    shift = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    wanted = float((law.directions @ shift).abs().mean())  # a shift moves every quantile by as much
    assert law.distance(draws + shift) == pytest.approx(wanted, abs=2 * law.floor(mixture))
    assert law.floor(mixture) < truth.LawSlices.of(mixture, 256).floor(mixture) / 2


def test_starting_noise_is_white() -> None:
    noise = truth.starting_noise(oracle.sharp(), 200, 1)
    assert noise.mean(0).abs().max() < 1e-12
    assert torch.allclose(noise.T @ noise / 200, torch.eye(8, dtype=torch.float64), atol=1e-10)


def test_noise_has_an_address() -> None:
    plan = compile_plan("euler_a", steps=4)
    like = torch.zeros(1, 5, 2, dtype=torch.float64)
    first, second = plan.rows[0], plan.rows[1]
    drawn = truth.CloudNoise(1)
    again = drawn.step(first.draws, first.span, like, [0])
    assert torch.equal(drawn.step(first.draws, first.span, like, [0]), again)
    assert not torch.equal(drawn.step(second.draws, second.span, like, [0]), again)
    assert not torch.equal(truth.CloudNoise(2).step(first.draws, first.span, like, [0]), again)


# --- budgets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "lcm"])
def test_a_budget_is_kept_and_used(name: str) -> None:
    """One step more would not fit."""
    setup = setup_without_grid(name)
    for nfe in (5, 14):
        plan = fitting_plan(setup, make("edm"), "karras", nfe)
        more = compile_plan(
            setup.sampler, schedule="edm", grid="karras", steps=plan.grid["steps"] + 1, **dict(setup.options)
        )
        assert plan.nfe == len(plan.rows) <= nfe < more.nfe


def test_every_sampler_and_grid_is_asked() -> None:
    assert {setup_without_grid(name).sampler for name in SAMPLERS} == set(samplers.REGISTRY) - {"ddim_inversion"}
    assert NFE == (5, 8, 10, 14, 20, 30, 50)
    assert "explicit" not in GRIDS
    assert same_levels("linear", GRIDS)["simple"] == "trailing"
    assert set(distinct_grids("linear", GRIDS)) | set(same_levels("linear", GRIDS)) == set(GRIDS)


def test_a_sampler_is_asked_for_without_a_grid() -> None:
    assert setup_without_grid("unipc:order=3") == SamplerSetup("unipc", options=(("order", 3),))
    assert setup_without_grid("DPM++ 2M").text == "dpmpp_2m"
    for text in ("dpmpp_2m:karras", "DPM++ 2M Karras"):
        with pytest.raises(PellucidError, match="without a grid"):
            setup_without_grid(text)


# --- orders ----------------------------------------------------------------------------------------------------


CERTAIN = [name for name in SAMPLERS if entry_of(setup_without_grid(name)).deterministic]
NOISY = [name for name in SAMPLERS if name not in CERTAIN and name != "lcm"]
FEW = ("ddim", "dpmpp_2m", "dpmpp_3m", "deis", "unipc:order=3", "lms")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in CERTAIN]
)
def test_measured_orders_are_those_of_the_registry(name: str) -> None:
    """Between 160 and 320 steps, as the study publishes them; `tests/laws` has the options, the schedules and 640."""
    found = oracle_orders.of_sampler(setup_without_grid(name))
    assert found["claimed"] == entry_of(setup_without_grid(name)).order + (name == "unipc:order=3")
    assert found["claimed"] - 0.15 <= found["order"] <= found["claimed"] + 0.6
    assert found["as_claimed"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NOISY)
def test_with_noise_too(name: str) -> None:
    """The claim is that of the noise off where it can be; on one path every diffusion solver here has order 1."""
    found = oracle_orders.of_sampler(setup_without_grid(name))
    assert found["as_claimed"]
    if name in (*oracle_orders.ONE_DIFFUSION, *oracle_orders.OWN_DIFFUSION):
        assert found["strong"] == pytest.approx(1.0, abs=0.15)
        assert found["strong_error"] < 0.05


def test_solvers_of_one_diffusion_meet_on_one_path() -> None:
    """The noise has an address, so two samplers end in one place; another diffusion ends elsewhere."""
    a, b = (oracle_orders.on_path(name, 80) for name in ("dpmpp_2m_sde", "dpmpp_3m_sde"))
    assert oracle.distance(a, b) < 0.05
    assert oracle.distance(a, oracle_orders.on_path("er_sde", 80)) > 0.1


def test_a_wrong_table_is_not_as_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the curvature costs DPM++ 3M an order."""
    right = oracle_orders.compiled

    def half(case: oracle_orders.Case, steps: int):
        return right(oracle_orders.replace(case, options={"curvature_scale": 0.5}), steps)

    monkeypatch.setattr(oracle_orders, "compiled", half)
    found = oracle_orders.of_sampler(setup_without_grid("dpmpp_3m"))
    assert found["order"] == pytest.approx(2.0, abs=0.2)
    assert not found["as_claimed"]


# --- the study -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> OracleStudy:
    study = OracleStudy(OracleStudyConfig(**QUICK), tmp_path_factory.mktemp("oracle") / "study")
    study.run()
    return study


def test_one_cell_is_what_the_engine_does(done: OracleStudy) -> None:
    """By hand: one plan, one run, one distance."""
    found = OracleResults.of(done.records.rows).one("edm", "smooth", 8, "dpmpp_2m", "karras")
    assert found is not None
    mixture = oracle.smooth()
    noise = truth.starting_noise(mixture, 32, 0)
    plan = compile_plan("dpmpp_2m", schedule="edm", grid="karras", steps=8)
    x = run(plan, mixture, noise * 80.0)
    assert (found.calls, found.steps) == (8, 8)
    exact = truth.exact_flow(mixture, noise, 80.0)
    assert found.figures["error"] == pytest.approx(oracle.distance(x, exact), rel=1e-9)
    assert found.figures["low"] < found.figures["error"] < found.figures["high"]
    assert found.figures["median"] < found.figures["high"]


def test_stochastic_samplers_are_judged_by_their_law_alone(done: OracleStudy) -> None:
    found = OracleResults.of(done.records.rows)
    for line in found.lines:
        assert ("error" in line.figures) != line.stochastic
        assert line.figures["sliced"] > 0
    assert {line.sampler for line in found.at("edm", "smooth", 8)} == {"ddim", "heun", "dpmpp_2m"}
    assert "euler_a" in {line.sampler for line in found.ranked("edm", "smooth", 8, "sliced")}


def test_one_table_under_two_names_is_one(done: OracleStudy) -> None:
    found = OracleResults.of(done.records.rows)
    assert found.twins == {"euler": "ddim"}
    assert found.names_of("ddim") == "ddim = euler"


def test_a_killed_study_goes_on(done: OracleStudy, tmp_path: Path) -> None:
    config = OracleStudyConfig(**QUICK)
    study = OracleStudy(config, tmp_path / "study")
    cells = study.missing()
    count = 0

    def stop(done: int) -> None:
        nonlocal count
        count += done
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(lambda what, total: nullcontext(stop))
    with (tmp_path / "study" / "records.jsonl").open("a") as file:
        file.write('{"part": "error", "sched')  # killed while it wrote
    again = OracleStudy(config, tmp_path / "study")
    assert again.missing() == cells[3:]
    again.run()

    def untimed(rows: list[dict]) -> list[dict]:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    assert untimed(again.records.rows) == untimed(done.records.rows)
    with pytest.raises(PellucidError) as refused:
        OracleStudy(OracleStudyConfig(**{**QUICK, "seed": 1}), tmp_path / "study")
    assert refused.value.code == "resume-config"


def test_a_folder_of_another_kind_or_version_is_refused_by_name(tmp_path: Path) -> None:
    config, path = OracleStudyConfig(**QUICK), tmp_path / "config.json"
    held = json.loads(OracleStudy(config, tmp_path / "none").text)
    for change, code, line in (
        (
            {"study": "guidance"},
            "study-folder",
            f"--out must be of an oracle study; got '{tmp_path}: a guidance study'.",
        ),
        ({"version": 2}, "study-version", f"study in {tmp_path} must be of version 1; got 2."),
        ({"version": 2, "seeds": 4}, "study-version", f"study in {tmp_path} must be of version 1; got 2."),
        ({"seed": 1}, "resume-config", f"config must be the one that began {tmp_path}; got another seed."),
    ):
        path.write_text(json.dumps({**held, **change}))
        with pytest.raises(PellucidError) as refused:
            OracleStudy(config, tmp_path)
        assert (refused.value.code, str(refused.value)) == (code, f"{line} Choose another --out.")
    path.write_text("no")
    with pytest.raises(PellucidError, match=r"--out must be of an oracle study; got .*: something else'"):
        OracleStudy(config, tmp_path)


def test_a_folder_from_before_studies_were_marked_goes_on(tmp_path: Path) -> None:
    config = OracleStudyConfig(**QUICK)
    held = json.loads(OracleStudy(config, tmp_path / "none").text)
    plain = {key: value for key, value in held.items() if key not in ("study", "version")}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert OracleStudy(config, tmp_path).missing()
    (tmp_path / "config.json").write_text(json.dumps({**plain, "seed": 1}))
    with pytest.raises(PellucidError, match="config must be the one that began"):
        OracleStudy(config, tmp_path)


def test_what_cannot_run_says_why() -> None:
    bench = OracleBench(OracleStudyConfig(**{**QUICK, "mixtures": ("smooth",), "schedules": ("flow",)}), "flow")
    lines = bench.measure(setup_without_grid("deis"), "trailing")["runs"]
    assert {line["refused"] for line in lines} == {"alpha-zero"}
    assert all("smooth" not in line for line in lines)
    assert all("refused" not in line for line in bench.measure(setup_without_grid("deis"), "leading")["runs"])


def test_the_report_is_whole(done: OracleStudy) -> None:
    figures = oracle_report.write(done)
    for name in (
        "report.html",
        "table.md",
        "figures.json",
        "charts/samplers.png",
        "charts/grids.png",
        "charts/laws.png",
    ):
        assert (done.folder / name).stat().st_size > 1000, name
    assert json.loads((done.folder / "figures.json").read_text("utf-8"))["same_tables"] == {"euler": "ddim"}
    first = figures["best"][0]
    assert (first["schedule"], first["mixture"], first["nfe"]) == ("edm", "smooth", 4)
    errors = [line["error"] for line in first["ranking"]]
    assert errors == sorted(errors)
    page = (done.folder / "report.html").read_text("utf-8")
    assert "edm, sharp" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_choice_costs_at_least_nothing(done: OracleStudy) -> None:
    found = OracleResults.of(done.records.rows)
    costs = oracle_report.regrets(found, ["edm"])
    assert all(value >= 1.0 for values in costs.values() for value in values)
    best = [min(values[i] for values in costs.values()) for i in range(2)]
    assert all(value < 1.5 for value in best)
    assert costs["dpmpp_2m", "karras"][1] == pytest.approx(
        math.sqrt(
            math.prod(
                found.one("edm", m, 8, "dpmpp_2m", "karras").figures["error"]
                / found.at("edm", m, 8)[0].figures["error"]
                for m in ("smooth", "sharp")
            )
        )
    )


def test_agreement_is_kendalls() -> None:
    order = list("abcdef")
    other = list("bacfde")
    wanted = stats.kendalltau(range(6), [other.index(name) for name in order]).statistic
    assert agreement(order, other) == pytest.approx(wanted)
    assert agreement(order, order) == 1.0
    assert agreement(order, order[::-1]) == -1.0


def test_changes_name_who_is_best_from_where(done: OracleStudy) -> None:
    found = OracleResults.of(done.records.rows)
    firsts = [found.at("edm", "sharp", nfe)[0].name for nfe in (4, 8)]
    words = changes(found, "edm", "sharp")
    assert all(name in words for name in firsts)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"nfe": (8, 4)}, "nfe must be numbers of model calls that grow"),
        ({"nfe": ()}, "nfe must be at least one"),
        ({"samplers": ("ddim", "ddim")}, "samplers must be at least one, none of them twice"),
        ({"samplers": ("dance",)}, "sampler must be a known name"),
        ({"samplers": ("ddim_inversion",)}, "sampler must be one that ends in an image"),
        ({"samplers": ("unipc:order=9",)}, "order must be"),
        ({"grids": ("explicit",)}, "grid must be one that"),
        ({"grids": ("sideways",)}, "grid must be a known name"),
        ({"schedules": ("cosinus",)}, "schedule must be a known name"),
        ({"mixtures": ("cake",)}, "mixture must be one of"),
        ({"points": 3}, "points must be at least 16"),
    ],
)
def test_a_wrong_config_is_one_line(change: dict, line: str) -> None:
    with pytest.raises(PellucidError) as refused:
        OracleStudyConfig(**{**QUICK, **change})
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


# --- the command -----------------------------------------------------------------------------------------------


def test_the_command_prints_the_best_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "study",
        "oracle",
        "--samplers",
        "Euler,dpmpp_2m",
        "--grids",
        "karras",
        "--schedules",
        "edm",
        "--nfe",
        "4,8",
    ]
    args += ["--points", "32", "--out", str(tmp_path / "study")]
    with pytest.raises(SystemExit) as end:
        app(args)
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "The best at each NFE, smooth mixture" in said
    assert "dpmpp_2m · karras" in said
    with pytest.raises(SystemExit):
        app([*args, "--json"])
    assert {row["nfe"] for row in json.loads(capsys.readouterr().out)["best"]} == {4, 8}
    with pytest.raises(SystemExit) as end:
        app([*args[:-1], str(tmp_path / "study"), "--seed", "4"])
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_levels_of_a_mixture_match_its_slow_form() -> None:
    """The closed form without [B, K, D] numbers against the one that has them."""
    mixture = oracle.sharp()
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for level in (Level(1.0, 50.0), Level(0.8, 0.6), Level(1.0, 1e-3), Level(0.0, 1.0)):
        at = x * max(level.sigma, 0.3)
        gap = at[:, None] - level.alpha * mixture.means
        variance = (level.alpha * mixture.spreads) ** 2 + level.sigma**2
        logits = mixture.weights.log() - 0.5 * (gap**2).sum(-1) / variance - 4.0 * variance.log()
        parts = mixture.means + (level.alpha * mixture.spreads**2 / variance)[:, None] * gap
        wanted = (logits.softmax(1)[:, :, None] * parts).sum(1)
        assert torch.allclose(mixture(at, level), wanted, rtol=1e-9, atol=1e-10)
