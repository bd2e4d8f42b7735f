"""The sampler study on an exact oracle: distances against a closed form, killed and gone on, shared, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle_pipe import SCHEDULE, SHAPE, Cut, OraclePipe, subject

from pellucid.core import schedule as schedules
from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError
from pellucid.core.loop import run
from pellucid.core.noise import Brownian, Philox
from pellucid.evidence.study.kernel import run_study
from pellucid.evidence.study.samplers import Judges, SamplerStudy, SamplerStudyConfig
from pellucid.evidence.study.samplers_results import LatencyClock
from pellucid.evidence.study.samplers_verdict import SamplerFigures
from pellucid.evidence.study.setups import SamplerSetup, Yardstick, lay_cells
from pellucid.evidence.study.subject import read_prompts

PROMPTS = ("a", "b", "c")
ASKED: dict[str, Any] = {
    "model": "oracle",
    "samplers": ("ddim:karras", "dpmpp_2m:karras", "euler_a:karras"),
    "steps": (5, 10, 20),
    "prompts": PROMPTS,
    "seeds": 4,
    "batch": 7,
    "converged_steps": 100,
    "path_steps": 80,
    "rounds": 2,
}
QUICK: dict[str, Any] = {
    "samplers": ("ddim:karras", "euler_a:karras"),
    "steps": (2, 3),
    "batch": 5,
    "converged_steps": 6,
    "path_steps": 6,
}


@pytest.fixture(autouse=True)
def no_weights(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine may have in its cache does not count."""
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path_factory.getbasetemp() / "no-cache"))


def config(**changes: Any) -> SamplerStudyConfig:
    return SamplerStudyConfig(**ASKED | changes)


def made(folder: Path, pipe: OraclePipe | None = None, **changes: Any) -> SamplerStudy:
    """A study whose images are all there."""
    found = SamplerStudy(config(**changes), folder, subject(pipe or OraclePipe()))
    found.run()
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SamplerStudy:
    """A study that nobody disturbed. Read it, or take a copy of its folder."""
    return made(tmp_path_factory.mktemp("whole") / "study")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> SamplerStudy:
    """A small one, to disturb copies of."""
    return made(tmp_path_factory.mktemp("quick") / "study", **QUICK)


def figures(found: SamplerStudy) -> SamplerFigures:
    return SamplerFigures(found, Judges.open(found))


def rows_of(folder: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    lines = [json.loads(line) for path in folder.glob("records*.jsonl") for line in path.read_text().splitlines()]
    return {(row["cell"], row["first"], row["what"]): {**row, "seconds": 0, "digest": ""} for row in lines}


# --- distances ---------------------------------------------------------------------------------------------------


def test_the_converged_image_is_where_the_exact_flow_leads(whole: SamplerStudy) -> None:
    """The yardstick against the closed form of one Gaussian, which no sampler computed."""
    pipe, best = OraclePipe(), whole.converged[0]
    plan = best.setup.plan(best.steps, SCHEDULE, "eps")
    for first in whole.config.firsts():
        numbers = whole.config.numbers(first)
        truth = pipe.flow(list(numbers), plan)
        gap = (whole.files.latents(best, first).double().flatten(1) - truth).square().mean(1).sqrt()
        assert float(gap.max()) < 1e-4


def test_distances_are_those_to_the_closed_form(whole: SamplerStudy) -> None:
    """Every latent distance, computed again from the plan alone and the closed form."""
    pipe = OraclePipe()
    found = figures(whole).results
    for cell in whole.table:
        if cell.stochastic:
            continue
        plan = compile_plan(cell.setup.sampler, schedule=SCHEDULE, target="eps", grid="karras", steps=cell.steps)
        seeds = list(range(whole.config.images))
        first = Philox(seeds).first(SHAPE, torch.empty(0, dtype=torch.float64), seeds) * plan.initial_scale
        x = run(plan, pipe.data, first).flatten(1)
        wanted = (x - pipe.flow(seeds, plan)).square().mean(1).sqrt()
        assert found.per_image(cell, "pictures", "latent") == pytest.approx(wanted.numpy(), abs=2e-4)


def test_pixel_distances_are_of_eight_bits(whole: SamplerStudy) -> None:
    cell = whole.table[0]
    best = next(one for one in whole.converged if one.key == cell.against)
    a, b = (np.stack([np.asarray(p) for p in whole.files.images(c, 0, 7)]).astype(float) / 255 for c in (cell, best))
    wanted = np.sqrt(((a - b) ** 2).mean((1, 2, 3)))
    assert whole.files.row(cell.key, 0, "pictures")["distance"] == pytest.approx(wanted, abs=1e-12)


def test_orders_show_in_the_distances(whole: SamplerStudy) -> None:
    """From 10 to 20 steps DDIM's error falls to a half, DPM++ 2M's by more, as its order is 2."""
    column = figures(whole).columns["latent"]
    value = {cell.key: v for cell, v in zip(whole.table, column.values, strict=True)}
    assert value["ddim:karras × 10"] / value["ddim:karras × 20"] == pytest.approx(2, rel=0.2)
    assert value["dpmpp_2m:karras × 10"] / value["dpmpp_2m:karras × 20"] > 2.6


def test_a_stochastic_sampler_nears_its_own_image(whole: SamplerStudy) -> None:
    """On one Brownian path its distance falls; to the deterministic image, another one, it does not."""
    cells = [cell for cell in whole.table if cell.stochastic]
    assert [cell.against for cell in cells] == ["converged: euler_a:exponential × 80"] * 3
    column = figures(whole).columns["latent"]
    own = [column.values[whole.table.index(cell)] for cell in cells]
    assert own[0] > 1.4 * own[1] > 1.4 * 1.4 * own[2]
    noisy = next(one for one in whole.converged if one.stochastic)
    apart = (whole.files.latents(noisy, 0) - whole.files.latents(whole.converged[0], 0)).square().mean().sqrt()
    assert float(apart) > 3 * own[2]


def test_noise_of_a_cell_is_on_the_path_with_the_samplers_clock() -> None:
    cells, _ = lay_cells(
        [SamplerSetup.parse("euler_a"), SamplerSetup.parse("ddim")],
        (4,),
        Yardstick(SamplerSetup.parse("heun"), 20, 20),
        SCHEDULE,
        "eps",
    )
    assert isinstance(cells[0].noise([1]), Brownian)
    assert isinstance(cells[1].noise([1]), Philox)
    assert cells[0].noise([1]).clock == cells[0].setup.plan(4, SCHEDULE, "eps").clock


def test_a_yardstick_that_a_schedule_refuses_is_named() -> None:
    """Pure noise has no largest sigma; nobody asked for the grid that needs one."""
    dark, asked = schedules.zero_terminal_snr(SCHEDULE), [SamplerSetup.parse("ddim:trailing")]
    with pytest.raises(PellucidError, match="--converged dpmpp_3m:exponential: sigma_min, sigma_max must be"):
        lay_cells(asked, (4,), SamplerStudyConfig("m", ("ddim",), (4,)).yardstick, dark, "v")
    assert len(lay_cells(asked, (4,), Yardstick(SamplerSetup.parse("dpmpp_3m:trailing"), 20, 20), dark, "v")[0]) == 1


@pytest.mark.parametrize("batch", [1, 12])
def test_the_size_of_a_batch_decides_nothing(quick: SamplerStudy, batch: int, tmp_path: Path) -> None:
    other = made(tmp_path / "study", **QUICK | {"batch": batch})
    for cell in other.table:
        mine, theirs = (figures(one).results.per_image(cell, "pictures", "latent") for one in (other, quick))
        assert mine == pytest.approx(theirs, rel=1e-6)


def test_how_converged_the_yardstick_is(whole: SamplerStudy) -> None:
    """What half of the steps are apart from all of them, for each yardstick; the exact one has hardly moved."""
    floor = figures(whole).results.floor("latent")
    assert list(floor) == [cell.key for cell in whole.converged]
    assert floor["converged: dpmpp_3m:exponential × 100"] < 1e-3 < floor["converged: euler_a:exponential × 80"]


def test_a_plan_from_a_file_is_a_cell_with_its_own_steps(tmp_path: Path) -> None:
    plan = compile_plan("ddim", schedule=SCHEDULE, target="eps", grid="karras", steps=3)
    path = tmp_path / "mine.json"
    path.write_text(plan.to_json())
    found = made(tmp_path / "study", **QUICK | {"samplers": ("ddim:karras", str(path))})
    cell = found.table[-1]
    assert (cell.setup.sampler.partition("#")[0], cell.steps, cell.nfe, len(found.table)) == ("mine", 3, 3, 3)
    column = figures(found).columns["latent"]
    assert column.values[2] == pytest.approx(column.values[1], rel=1e-9)


# --- killed, shared, asked for more ------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 4, 17])
def test_a_killed_study_goes_on(quick: SamplerStudy, tmp_path: Path, stop: int) -> None:
    pipe = OraclePipe(stop=stop)
    with pytest.raises(Cut):
        made(tmp_path / "study", pipe, **QUICK)
    records = tmp_path / "study" / "records.jsonl"
    if records.exists():  # the last line was half written
        with records.open("a") as file:
            file.write('{"cell": "ddim:kar')
    again = OraclePipe()
    made(tmp_path / "study", again, **QUICK)
    assert stop + len(again.calls) == len(rows_of(quick.folder))
    assert rows_of_whole(tmp_path / "study") == rows_of(quick.folder)


def rows_of_whole(folder: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Without the torn line."""
    path = folder / "records.jsonl"
    path.write_text("".join(f"{line}\n" for line in path.read_text().splitlines() if line.endswith("}")))
    return rows_of(folder)


def test_shards_make_the_same_study(quick: SamplerStudy, tmp_path: Path) -> None:
    for index in (0, 1):
        SamplerStudy(config(**QUICK), tmp_path / "study", subject(OraclePipe()), (index, 2)).run()
    files = sorted(path.name for path in (tmp_path / "study").glob("records*"))
    assert files == ["records-0of2.jsonl", "records-1of2.jsonl"]
    assert rows_of(tmp_path / "study") == rows_of(quick.folder)
    last = OraclePipe()
    made(tmp_path / "study", last, **QUICK)
    assert not last.calls  # nothing is made twice


def test_samplers_and_steps_can_be_added(quick: SamplerStudy, tmp_path: Path) -> None:
    shutil.copytree(quick.folder, tmp_path / "study")
    pipe = OraclePipe()
    made(tmp_path / "study", pipe, **QUICK | {"samplers": (*QUICK["samplers"], "heun:karras"), "steps": (2, 3, 1)})
    assert len(pipe.calls) == 3 * (2 + 3)  # of three batches: one step of the two, and all three of the new one


# --- damaged -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["latents", "pictures"])
def test_a_yardstick_that_changed_is_refused_by_name(quick: SamplerStudy, tmp_path: Path, kind: str) -> None:
    """A study that goes on does not measure against what a damaged file says."""
    folder = Path(shutil.copytree(quick.folder, tmp_path / "study"))
    path = sorted((folder / kind).glob("converged-*/*"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(PellucidError) as error:
        made(folder, **QUICK | {"steps": (2, 3, 1)})
    assert error.value.code == "study-damaged"
    assert str(error.value).startswith(f"{path.relative_to(folder)} of {folder} must be as the study wrote it;")
    assert "\n" not in str(error.value)
    path.unlink()
    with pytest.raises(PellucidError, match=str(path.relative_to(folder))):
        made(folder, **QUICK | {"steps": (2, 3, 1)})


def test_a_record_that_changed_is_made_again(quick: SamplerStudy, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quick.folder, tmp_path / "study"))
    path = folder / "records.jsonl"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"distance": [0.' in line)
    lines[at] = lines[at].replace('"distance": [0.', '"distance": [1.')
    path.write_text("\n".join(lines) + "\n")
    pipe = OraclePipe()
    again = made(folder, pipe, **QUICK)
    assert len(pipe.calls) == 1
    assert figures(again).columns["distance"].values == pytest.approx(figures(quick).columns["distance"].values)


def test_a_study_from_before_digests_goes_on_with_a_note(quick: SamplerStudy, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quick.folder, tmp_path / "study"))
    path = folder / "records.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    old = [{key: value for key, value in row.items() if key not in ("digest", "files")} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    assert not [note for note in figures(quick).notes() if "older version" in note]
    found = made(folder, **QUICK | {"steps": (2, 3, 1)})
    assert [note for note in figures(found).notes() if "older version" in note]


def test_every_image_has_its_own_seed_and_prompt(tmp_path: Path) -> None:
    pipe = OraclePipe()
    made(tmp_path / "study", pipe, **QUICK | {"seed": 100})
    calls = [call for call in pipe.calls if (call["sampler"], call["steps"]) == ("ddim", 2)]
    seen = [pair for call in calls for pair in zip(call["prompt"], call["seed"], strict=True)]
    assert seen == [(PROMPTS[n // 4], 100 + n) for n in range(12)]


# --- times -------------------------------------------------------------------------------------------------------


def test_times_are_measured_apart_and_once(quick: SamplerStudy, tmp_path: Path) -> None:
    shutil.copytree(quick.folder, tmp_path / "study")
    pipe = OraclePipe()
    found = SamplerStudy(config(**QUICK | {"rounds": 3}), tmp_path / "study", subject(pipe))
    LatencyClock(found).run()
    timed = pipe.calls[2:]  # the first two warm up
    assert len(timed) == 3 * 4
    assert all(len(call["seed"]) == 1 and "noise" not in call for call in timed)
    orders = [[(c["sampler"], c["steps"]) for c in timed[i : i + 4]] for i in (0, 4, 8)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len({tuple(order) for order in orders}) > 1  # each round has an order of its own
    again = LatencyClock(found)
    assert not again.missing()
    assert all(len(again.of(cell).seconds) == 3 for cell in found.table)
    again.machine = "another"  # whose times do not count here
    assert len(again.missing()) == 12
    assert not again.of(found.table[0]).seconds


# --- refused -----------------------------------------------------------------------------------------------------


BAD: list[tuple[dict[str, Any], str]] = [
    ({"samplers": ("no_such",)}, "sampler must be a known name"),
    ({"samplers": ("ddim:no_such",)}, "grid must be a known name"),
    ({"samplers": ("ddim:karras:trailing",)}, "NAME"),
    ({"samplers": ("ddim:eta=x",)}, "option eta must be a number"),
    ({"samplers": ("ddim:wrong=1",)}, "Known: eta"),
    ({"samplers": ("plan.json",)}, "plan must be a file that exists"),
    ({"samplers": ()}, "samplers must be at least one"),
    ({"steps": ()}, "steps must be at least one"),
    ({"steps": (0,)}, "steps must be whole numbers from 1 on"),
    ({"steps": (5, 5)}, "steps must be different"),
    ({"steps": (80,)}, "converged_steps must be at least twice"),
    ({"seeds": 0}, "seeds must be"),
    ({"batch": 1000}, "batch must be"),
    ({"guidance": "no + such"}, "guidance"),
    ({"converged": "nothing"}, "sampler must be a known name"),
    ({"by": "taste"}, "by must be one of distance, latent, kid, image_text, right"),
]


@pytest.mark.parametrize(("changes", "words"), BAD)
def test_bad_configs_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    pipe = OraclePipe()
    with pytest.raises(PellucidError, match=words):
        SamplerStudy(config(**changes), tmp_path / "study", subject(pipe))
    assert not pipe.calls
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samplers": ("ddim", "DDIM")}, "samplers must be different"),
        ({"converged": "euler_a"}, "converged must be a deterministic sampler"),
        ({"prompts": ()}, "prompts must be given to oracle"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match=words):
        SamplerStudy(config(**changes), tmp_path / "study", subject(OraclePipe()))


def test_prompts_for_a_model_without_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="prompts must be left out: oracle takes neither"):
        SamplerStudy(config(), tmp_path / "study", subject(OraclePipe(), asks="nothing"))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("version", 2, "must be of version 1; got 2"),
        ("study", "guidance", "of a sampler study"),
        ("mark", "another", "model must be the one that began"),
        ("seeds", 5, "another seeds"),
        ("prompts", ["x"], "another prompts"),
        ("batch", 6, "another batch"),
    ],
)
def test_another_studys_folder_is_refused_and_kept(
    quick: SamplerStudy, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    shutil.copytree(quick.folder, tmp_path / "study")
    path = tmp_path / "study" / "config.json"
    held = json.loads(path.read_text()) | {key: value}
    path.write_text(json.dumps(held))
    with pytest.raises(PellucidError, match=words):
        made(tmp_path / "study", **QUICK)
    assert json.loads(path.read_text()) == held
    assert rows_of(tmp_path / "study") == rows_of(quick.folder)


def test_one_guidance_in_other_words_is_the_same_study(tmp_path: Path) -> None:
    made(tmp_path / "study", **QUICK | {"guidance": 3})
    again = OraclePipe()
    made(tmp_path / "study", again, **QUICK | {"guidance": "3.0"})
    assert not again.calls


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(PellucidError, match="--out must be empty, new"):
        made(tmp_path)


def test_a_cell_that_fails_is_named(tmp_path: Path) -> None:
    class Failing(OraclePipe):
        def __call__(self, *args: Any, **options: Any) -> Any:
            if options["steps"] == 3:
                raise PellucidError("images must be numbers; got NaN in image 0.", "nan")
            return super().__call__(*args, **options)

    with pytest.raises(PellucidError, match="ddim:karras × 3: images must be numbers"):
        made(tmp_path / "study", Failing(), **QUICK)
    assert any(cell == "ddim:karras × 2" for cell, _, _ in rows_of(tmp_path / "study"))  # what was made is kept


def test_prompts_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffa red star\n\n  a blue square \n", encoding="utf-8")
    assert read_prompts(path) == ("a red star", "a blue square")
    assert read_prompts(None) == ()
    assert len(read_prompts("scenes:3")) == 3
    path.write_text("\n \n")
    with pytest.raises(PellucidError, match="prompts must be at least one line"):
        read_prompts(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(PellucidError, match="UTF-8"):
        read_prompts(path)
    for bad in (tmp_path / "none.txt", "scenes:no", "scenes:0"):
        with pytest.raises(PellucidError, match="prompts must be"):
            read_prompts(bad)


def test_a_pipeline_object_cannot_be_sent_to_processes(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="processes, ray must be left out"):
        run_study(SamplerStudy, config(), tmp_path / "study", pipe=subject(OraclePipe()), processes=2)


def test_what_is_no_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="model must be a loaded pipeline"):
        SamplerStudy.open(config(), tmp_path / "study", pipe=object())
