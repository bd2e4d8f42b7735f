"""The guidance study: a maker whose law is known has the range that the law says; a cut study goes on; bad input is
one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from guided_truth import GuidedTruth, Killed
from PIL import Image

from pellucid.core.errors import PellucidError
from pellucid.evidence.adherence.samples import ImageSettings
from pellucid.evidence.metrics.image_text import Judge, image_text
from pellucid.evidence.metrics.images import Pixels
from pellucid.evidence.study import guidance_report
from pellucid.evidence.study.guidance import PROMPTS_SHOWN, TRUE_IMAGES, GuidanceStudy, GuidanceStudyConfig
from pellucid.evidence.study.guidance_report import results_of
from pellucid.evidence.study.oracle import OracleStudy, OracleStudyConfig

CONFIG = GuidanceStudyConfig("law", (1.0, 4.0, 8.0), ("plain", "dynamic"), "scenes:5", seeds=2, batch=4)
CELLS = 5  # the unguided one is shared


def maker(config: GuidanceStudyConfig = CONFIG, **changes: Any) -> GuidedTruth:
    return GuidedTruth(config.asked.truth, config.seeds, **changes)


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> GuidanceStudy:
    pipe = maker()
    study = GuidanceStudy(CONFIG, tmp_path_factory.mktemp("law") / "out", pipe)
    study.run()
    assert pipe.calls == CELLS * 3  # two prompts per batch
    return study


@pytest.fixture
def copy(law: GuidanceStudy, tmp_path: Path) -> Path:
    """The study's folder to do harm to."""
    return Path(shutil.copytree(law.folder, tmp_path / "copy"))


# What it finds


def test_the_range_is_the_law_s(law: GuidanceStudy) -> None:
    """Half wrong at 1, right at 4; at 8 plain clips and a threshold does not."""
    report = guidance_report.GuidanceReport.of(law)
    plain, dynamic = report.lines
    assert [one.adherent for one in plain.cells][:2] == [False, True]
    assert [one.scale for one in plain.range] == [4]
    assert [one.scale for one in dynamic.range] == [4, 8]
    assert any("clipped values" in fault for fault in plain.cells[2].faults)
    assert report.advice.guidance == "4"
    assert report.advice.words.startswith("Use --guidance '4' (plain, useful at this scale alone): ")
    assert report.advice.words.count(". ") == 0
    pasted = guidance_report.command(law.config, "4")  # `pellucid sample` would cap and rescale it
    assert pasted.endswith('"…" --sampler dpmpp_2m --steps 20 --guidance "4"')


def test_every_figure_has_its_interval_and_the_unguided_images_are_shared(law: GuidanceStudy) -> None:
    found = results_of(law)
    assert found is not None
    assert len(found.cells) == CELLS
    assert found.line("plain")[0] == found.line("dynamic")[0]
    for cell in found.cells.values():
        assert cell.count == 10
        assert set(cell.figures) == {
            "right", "attributes", "bled", "saturation", "colourfulness", "sharpness", "diversity",
        }  # fmt: skip
        for figure in cell.figures.values():
            assert figure.low <= figure.value <= figure.high
    assert found.reference.name == "true images"
    assert found.cells["4"].figures["sharpness"].value == pytest.approx(found.reference.values["sharpness"], rel=0.02)


def test_guidance_costs_diversity(law: GuidanceStudy) -> None:
    found = results_of(law)
    assert found.cells["1"].figures["diversity"].value > 3 * found.cells["4"].figures["diversity"].value


def test_bleeding_is_seen_where_the_law_swaps_colours(tmp_path: Path) -> None:
    config = replace(CONFIG, scales=(4.0, 13.0), rules=("dynamic",), prompts="scenes:6", seeds=1)
    study = GuidanceStudy(config, tmp_path / "out", maker(config))
    study.run()
    found = results_of(study)
    assert found.cells["4 + threshold"].figures["bled"].value == 0
    assert found.cells["13 + threshold"].figures["bled"].value > 0.5
    assert "diversity" not in found.names  # of one image there is none


def test_batches_decide_nothing(law: GuidanceStudy, tmp_path: Path) -> None:
    config = replace(CONFIG, batch=6, scales=(4.0,), rules=("plain",))
    study = GuidanceStudy(config, tmp_path / "out", maker(config))
    study.run()
    mine, other = results_of(study).cells["4"], results_of(law).cells["4"]
    for name, values in mine.by_prompt.items():
        torch.testing.assert_close(values, other.by_prompt[name], equal_nan=True)


# Cut, and gone on


def test_a_killed_study_goes_on_and_ends_alike(law: GuidanceStudy, tmp_path: Path) -> None:
    config, folder = replace(CONFIG, scales=(1.0, 4.0), rules=("plain",)), tmp_path / "out"
    with pytest.raises(Killed):
        GuidanceStudy(config, folder, maker(config, dies_after=4)).run()
    lines = (folder / "records.jsonl").read_text()
    (folder / "records.jsonl").write_text(lines[:-40])  # and its last line was being written
    pipe = maker(config)
    again = GuidanceStudy(config, folder, pipe)
    assert len(again.missing()) == 3  # of 6
    again.run()
    assert pipe.calls == 3
    want = [row for row in law.records.rows if row["guidance"] in ("1", "4", TRUE_IMAGES)]
    assert sorted(again.records.rows, key=str) == sorted(want, key=str)
    whole = maker(config)
    GuidanceStudy(config, folder, whole).run()
    assert whole.calls == 0


def test_a_study_of_which_nothing_was_made_leaves_nothing(tmp_path: Path) -> None:
    study = GuidanceStudy(CONFIG, tmp_path / "out", maker(dies_after=0))
    with pytest.raises(Killed):
        study.run()
    assert not (tmp_path / "out").exists()
    with pytest.raises(PellucidError, match="a cell of the study must be finished for a report"):
        guidance_report.write(study)


def test_an_unfinished_study_reports_what_is_whole(copy: Path, law: GuidanceStudy) -> None:
    rows = [row for row in law.records.rows if row["guidance"] != "8"]
    (copy / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = guidance_report.GuidanceReport.of(GuidanceStudy(CONFIG, copy))
    assert "unfinished: 1 guidances are missing" in guidance_report.headline(report)
    assert [one.scale for one in report.lines[0].cells] == [1, 4]


@pytest.mark.parametrize(
    "other",
    [
        replace(CONFIG, seed=1),
        replace(CONFIG, scales=(1.0, 4.0)),
        replace(CONFIG, model="other"),
    ],
)
def test_a_folder_of_another_study_is_refused(copy: Path, other: GuidanceStudyConfig) -> None:
    with pytest.raises(PellucidError, match="Choose another --out"):
        GuidanceStudy(other, copy)


def test_another_tolerance_judges_the_same_images_anew(copy: Path) -> None:
    study = GuidanceStudy(replace(CONFIG, tolerance=0.001), copy)
    assert not study.missing()
    assert study.records.rows


def test_a_folder_of_another_version_model_or_kind_is_refused_and_kept(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="Choose another --out"):
        GuidanceStudy(CONFIG, copy, model_hash="weights-1:other")
    text = (copy / "config.json").read_text().replace('"version": 1', '"version": 0')
    (copy / "config.json").write_text(text)
    with pytest.raises(PellucidError, match=r"must be of version 1; got 0\. Choose another --out") as refused:
        GuidanceStudy(CONFIG, copy)
    assert refused.value.code == "study-version"
    assert (copy / "config.json").read_text() == text
    (copy / "config.json").write_text(OracleStudy(OracleStudyConfig(), tmp_path / "none").text)
    with pytest.raises(PellucidError, match=r"--out must be of a guidance study; got .*: an oracle study'") as refused:
        GuidanceStudy(CONFIG, copy)
    assert refused.value.code == "study-folder"
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "mine.txt").write_text("dear")
    with pytest.raises(PellucidError, match="--out must be empty, new, or a study of this config"):
        GuidanceStudy(CONFIG, tmp_path / "letters")


def test_a_folder_from_before_studies_were_marked_goes_on(copy: Path) -> None:
    held = json.loads((copy / "config.json").read_text())
    assert held.pop("study") == "guidance"
    (copy / "config.json").write_text(json.dumps(held))
    assert not GuidanceStudy(CONFIG, copy).missing()
    (copy / "config.json").write_text(json.dumps({**held, "version": 0}))
    with pytest.raises(PellucidError, match="must be of version 1; got 0"):
        GuidanceStudy(CONFIG, copy)


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PellucidError, match="--out must be a folder that can be written to"):
        GuidanceStudy(CONFIG, tmp_path / "file" / "out")


# What it asks a pipeline for


def test_every_cell_starts_from_the_same_noise(tmp_path: Path) -> None:
    heard: list[tuple[Any, ...]] = []

    def pipe(prompt: list[str], /, **options: Any) -> SimpleNamespace:
        heard.append((tuple(prompt), tuple(options["seed"]), options["guidance"], options["sampler"], options["steps"]))
        return SimpleNamespace(images=[Image.new("RGB", (32, 32), (n, 80, 90)) for n in options["seed"]])

    config = GuidanceStudyConfig(
        "x", (1.0, 3.0), ("plain", "apg"), "scenes:3", seeds=3, batch=2, sampler="ddim", steps=7, seed=5
    )
    study = GuidanceStudy(config, tmp_path / "out", pipe)
    study.run()
    by_cell: dict[str, list[tuple[str, int]]] = {}
    for prompt, seed, guidance, sampler, steps in heard:
        assert (sampler, steps) == ("ddim", 7)
        assert len(prompt) <= 2
        by_cell.setdefault(guidance, []).extend(zip(prompt, seed, strict=True))
    want = [(text, 5 + 3 * i + j) for i, text in enumerate(study.asked.texts) for j in range(3)]
    assert by_cell == {"1": want, "3": want, "3 + apg": want}


def test_too_few_images_are_refused(tmp_path: Path) -> None:
    study = GuidanceStudy(
        CONFIG, tmp_path / "out", lambda prompt, /, **_: SimpleNamespace(images=[Image.new("RGB", (32, 32))])
    )
    with pytest.raises(PellucidError, match="images must be 4, one per prompt; got 1"):
        study.run()


def test_making_takes_a_text_with_rules_and_refuses_nonsense() -> None:
    assert ImageSettings(guidance="4 + rescale phi=0.5").guidance == "4 + rescale phi=0.5"
    for bad in ("4 + bogus", float("nan"), -1.0):
        with pytest.raises(PellucidError):
            ImageSettings(guidance=bad)


# Prompts of a file, an encoder, true images in a folder


def colours(prompt: list[str], /, *, seed: list[int], **_: Any) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed[0])
    pixels = torch.randint(0, 255, (len(prompt), 32, 32, 3), generator=generator, dtype=torch.uint8).numpy()
    return SimpleNamespace(images=[Image.fromarray(one) for one in pixels])


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("a cab\n\nbad face\n  deaf  \n", encoding="utf-8")
    return path


def test_prompts_of_a_file_are_scored_by_the_encoder(texts: Path, tmp_path: Path, clip_folder: Path) -> None:
    config = GuidanceStudyConfig("x", (1.0, 2.0), ("plain",), str(texts), seeds=2, batch=6, clip=str(clip_folder))
    judge = Judge.load(clip_folder)
    study = GuidanceStudy(config, tmp_path / "out", colours, judge)
    study.run()
    found = results_of(study)
    assert found.adherence == "image_text"
    assert found.reference.name == "unguided ones"
    lines = ["a cab", "bad face", "deaf"]
    made = np.stack([np.asarray(one) for one in colours([""] * 6, seed=[0]).images])
    asked = [text for text in lines for _ in range(2)]
    want = image_text(Pixels(torch.from_numpy(made).permute(0, 3, 1, 2)), asked, judge)
    assert found.cells["1"].figures["image_text"].value == pytest.approx(want.estimate.value, abs=1e-4)
    report = guidance_report.write(study)
    assert "image-text score" in report.advice.words
    assert "right" not in report.plain()["cells"][0]


def test_captions_of_scenes_in_a_file_are_read(tmp_path: Path) -> None:
    path = tmp_path / "captions.txt"
    path.write_text("a red star\na small blue square on a white background\n")
    config = GuidanceStudyConfig("x", (1.0,), ("plain",), str(path), seeds=1)
    assert [len(query.objects) for query in config.asked.queries] == [1, 1]
    assert replace(config, clip="somewhere").asked.queries is None  # an encoder that is named is meant


def test_a_reference_of_one_s_own(tmp_path: Path) -> None:
    folder = tmp_path / "true"
    folder.mkdir()
    for n in range(4):
        Image.new("RGB", (32, 32), (200, 10 * n, 30)).save(folder / f"{n}.png")
    config = GuidanceStudyConfig("x", (2.0,), ("plain",), "scenes:2", seeds=1, reference=str(folder))
    study = GuidanceStudy(config, tmp_path / "out", colours)
    study.run()
    (row,) = [row for row in study.records.rows if row["guidance"] == TRUE_IMAGES]
    assert row["figures"]["saturation"] == [pytest.approx(1 / 3, abs=1e-5), 0.0, 0.0, 0.0]
    Image.new("RGB", (48, 32)).save(folder / "9.png")
    wide = GuidanceStudy(config, tmp_path / "wide", colours)
    with pytest.raises(PellucidError, match=r"images of --reference must be 32×32, as the model's; got '48×32'"):
        wide.run()
    assert len(wide.records.rows) == 1  # what was made is kept


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (b"", "prompts must be at least one line"),
        (b"\xff\xfe", "prompts must be text in UTF-8"),
        (None, "prompts must be a text file that exists"),
    ],
)
def test_a_bad_file_of_prompts_is_refused(tmp_path: Path, text: bytes | None, hint: str) -> None:
    path = tmp_path / "p.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(PellucidError, match=r".") as error:
        _ = GuidanceStudyConfig("x", prompts=str(path)).asked
    assert hint in str(error.value)


@pytest.mark.parametrize("words", ["scenes:", "scenes:0", "scenes:x", "scenes:1000000"])
def test_a_bad_number_of_scenes_is_refused(words: str) -> None:
    with pytest.raises(PellucidError, match=r"prompts must be scenes:N, N from 1 to 100,000"):
        _ = GuidanceStudyConfig("x", prompts=words).asked
    assert len(GuidanceStudyConfig("x").asked) == 64


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"scales": ()}, "scales must be at least one"),
        ({"scales": (2.0, 2.0)}, "none of them twice"),
        ({"scales": (4.0, 2.0)}, "numbers that grow"),
        ({"scales": (-1.0, 2.0)}, "guidance scale must be a number from 0"),
        ({"scales": (2.0, float("nan"))}, "guidance"),
        ({"rules": ("plain", "bogus")}, "rules must be of plain, rescale"),
        ({"rules": ("plain", "plain")}, "none of them twice"),
        ({"rules": ("rescale phi=2",)}, "phi of rescale must be a number from 0 to 1"),
        ({"rules": ("rescale strength=1",)}, "option of rescale must be one of"),
        ({"rules": ("plain phi=1",)}, "options of plain must be none"),
        ({"scales": tuple(float(i) for i in range(1, 80))}, "scales × rules must be at most 400"),
        ({"seeds": 0}, "seeds must be a whole number"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"batch": 257}, "batch must be a whole number"),
        ({"tolerance": 0.0}, "tolerance must be above 0"),
        ({"part": "vae"}, "part must be unet or dit"),
        ({"prompts": "some.txt", "scales": (2.0, 4.0)}, "scales must be with 1 among them"),
    ],
)
def test_bad_settings_are_one_line(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(PellucidError) as error:
        GuidanceStudyConfig("x", **changes)
    assert hint in str(error.value)
    assert "\n" not in str(error.value)


def test_prompts_that_need_an_encoder_say_so(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(PellucidError, match="--clip must be given for prompts that are no captions of scenes"):
        GuidanceStudy(GuidanceStudyConfig("x", prompts=str(texts)), tmp_path / "out")
    with pytest.raises(PellucidError, match="judge must be given with clip"):
        GuidanceStudy(CONFIG, tmp_path / "out", colours, object())  # type: ignore[arg-type]


# The report


def test_the_report_is_whole(copy: Path) -> None:
    study = GuidanceStudy(CONFIG, copy)
    report = guidance_report.write(study)
    held = json.loads((copy / "figures.json").read_text())
    assert held == json.loads(json.dumps(report.plain()))
    assert held["ranges"] == [
        {"rule": "plain", "range": [4.0, 4.0], "useful": [4.0]},
        {"rule": "dynamic", "range": [4.0, 8.0], "useful": [4.0, 8.0]},
    ]
    page = (copy / "report.html").read_text()
    assert report.advice.words.replace("'", "&#x27;") in page
    assert "http" not in page.replace("http-equiv", "")
    for guidance in study.guidances:
        assert f'data-cell="{guidance}"' in page
        assert len(study.shown(guidance)) == min(PROMPTS_SHOWN, 5)
    for name in ("range", "right", "bled", "saturation", "colourfulness", "sharpness", "diversity", "pictures"):
        with Image.open(copy / "charts" / f"{name}.png") as chart:
            assert len(chart.convert("RGB").getcolors(2**24)) > 20
    told = (copy / "table.md").read_text()
    assert "| dynamic | 4 to 8 | 4 |" in told
    (doubt,) = report.plain()["doubts"]  # of five prompts
    assert doubt.startswith("Doubtful: 5 prompts with 10 images a guidance")
    assert doubt in told
    assert "Doubtful: 5 prompts" in page
    assert "true images" in told
    assert not list(copy.rglob(".*.part*"))
