"""The study of adherence: a perfect model scores all, a wrong one nothing, a cut one goes on, a bad one is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from scipy.stats import binomtest
from tiny_scenes import Truth, write_model

from pellucid import scenes
from pellucid.core.errors import PellucidError
from pellucid.evidence.adherence import sheets, study
from pellucid.evidence.adherence.judging import ATTRIBUTES, judge, reading_from_json, reading_to_json
from pellucid.evidence.adherence.samples import ImageSettings, open_pipe
from pellucid.evidence.adherence.sheets import Card, contact_sheet
from pellucid.evidence.adherence.study import AdherenceConfig, AdherenceStudy, figures, shuffled
from pellucid.evidence.statistics import Share
from pellucid.scenes.scene import Scene, SceneObject, Scenes

CONFIG = AdherenceConfig("truth", prompts=40, making=ImageSettings(batch=16))


def truth(rule: Any = lambda n, _: n) -> Truth:
    """Draws the very scenes that the captions of CONFIG are of."""
    return Truth(scenes.sample(torch.arange(40), 0, "held_out", ("flat",), CONFIG.objects), rule)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> AdherenceStudy:
    study = AdherenceStudy(CONFIG, tmp_path_factory.mktemp("perfect") / "out", truth())
    study.run()
    return study


# Shares


@pytest.mark.parametrize(("right", "count"), [(0, 7), (7, 7), (3, 7), (950, 1000), (1, 1000)])
def test_the_interval_is_wilson_s(right: int, count: int) -> None:
    want = binomtest(right, count).proportion_ci(method="wilson")
    assert Share(right, count).interval == pytest.approx((want.low, want.high), abs=1e-12)


def test_what_was_not_asked_counts_nowhere() -> None:
    assert Share.of([True, None, False, True]) == Share(2, 3)
    assert Share.of([None]).words == "–"
    assert Share.of([]).plain()["share"] is None


# Verdicts

PAIR = Scene(
    (SceneObject("star", "red", "solid", 0.25, 0.5, 0.11), SceneObject("square", "blue", "striped", 0.75, 0.5, 0.11))
)


def verdict_of(shown: Scene, asked: Scene) -> Any:
    (_, query), *_ = scenes.described(Scenes.of([asked]), full=True)
    (reading,) = scenes.read(scenes.render(Scenes.of([shown])))
    return judge(reading_from_json(json.loads(json.dumps(reading_to_json(reading)))), query)


def changed(**changes: Any) -> Scene:
    """The pair with another second thing."""
    return replace(PAIR, things=(PAIR.things[0], replace(PAIR.things[1], **changes)))


def test_the_image_itself_is_right() -> None:
    found = verdict_of(PAIR, PAIR)
    assert found.right
    assert found.readable
    assert found.bled is False
    assert set(found.marks) <= set(ATTRIBUTES)
    assert found.words == "right"


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        (changed(shape="circle"), {"shape"}),
        (changed(colour="green"), {"colour"}),
        (changed(texture="solid"), {"texture"}),
        (changed(radius=0.165), {"size"}),
        (replace(PAIR, background="pale green"), {"background"}),
        (replace(PAIR, things=PAIR.things[:1]), {"count"}),
    ],
)
def test_a_fault_is_found_where_it_is(shown: Scene, wrong: set[str]) -> None:
    found = verdict_of(shown, PAIR)
    faults = {name for name, right in found.marks.items() if not right}
    assert not found.right
    assert faults == wrong or ("count" in wrong and wrong < faults)
    assert found.words != "right"


def test_a_wrong_relation_is_found() -> None:
    above = replace(PAIR, things=(replace(PAIR.things[0], x=0.5, y=0.2), replace(PAIR.things[1], x=0.5, y=0.7)))
    assert {name for name, right in verdict_of(above, PAIR).marks.items() if not right} == {"relation"}


def test_swapped_colours_bleed_and_a_new_colour_does_not() -> None:
    a, b = PAIR.things
    swapped = replace(PAIR, things=(replace(a, colour="blue"), replace(b, colour="red")))
    assert verdict_of(swapped, PAIR).bled is True
    assert verdict_of(changed(colour="green"), PAIR).bled is False
    twins = replace(PAIR, things=(a, replace(b, shape="star")))
    assert verdict_of(PAIR, twins).bled is None


def test_noise_cannot_be_read_and_nothing_of_it_is_right() -> None:
    (_, query), *_ = scenes.described(Scenes.of([PAIR]), full=True)
    noise = torch.rand(1, 3, 128, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    found = judge(scenes.read(noise)[0], query)
    assert not found.readable
    assert not found.right
    assert not any(found.marks.values())


# The study


def test_a_perfect_model_scores_all(perfect: AdherenceStudy) -> None:
    found = figures(perfect.shown())
    assert list(found) == ["1", "2", "3", "all"]
    assert found["all"].right.count == 40
    assert found["all"].right.right >= 39  # the reader's promise is 99.5 %
    assert found["all"].shuffled.right == 0
    assert sum(found[str(n)].right.count for n in (1, 2, 3)) == 40
    assert "relation" not in found["1"].attributes
    assert "place" not in found["2"].attributes
    assert found["1"].bled.count == 0


def test_a_model_that_draws_another_caption_scores_nothing(tmp_path: Path) -> None:
    config = replace(CONFIG, prompts=16)
    study = AdherenceStudy(config, tmp_path / "out", truth(lambda n, _: n + 1))
    study.run()
    found = study.results()
    assert found["all"].right.right == 0


def test_shuffling_keeps_the_number_of_objects_and_no_own_caption(perfect: AdherenceStudy) -> None:
    shown = perfect.shown()
    same = [replace(one, query=shown[0].query, reading=shown[0].reading) for one in shown]
    assert all(verdict.right for verdict in shuffled(same).values())  # the ring compares readings with queries
    lone = [one for one in shown if len(one.query.objects) == 1][:1]
    assert shuffled(lone) == {}


def test_images_come_back_as_they_were(perfect: AdherenceStudy) -> None:
    shown = perfect.shown()
    wanted = [shown[37], shown[2], shown[15]]
    made = truth()(["", "", ""], seed=[37, 2, 15]).images
    assert [image.tobytes() for image in perfect.images(wanted)] == [image.tobytes() for image in made]


def test_a_study_that_was_cut_goes_on_to_the_same_figures(perfect: AdherenceStudy, tmp_path: Path) -> None:
    def cut(n: int, _: Any) -> int:
        if n >= 16:
            raise KeyboardInterrupt
        return n

    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        AdherenceStudy(CONFIG, folder, truth(cut)).run()
    with (folder / "records.jsonl").open("a") as file:
        file.write('{"first": 16, "pic')  # the line at which it was killed
    rest = truth()
    study = AdherenceStudy(CONFIG, folder, rest)
    assert study.missing() == [(16,), (32,)]
    study.run()
    assert study.shown() == perfect.shown()
    assert rest.calls == 2
    assert AdherenceStudy(CONFIG, folder).missing() == []
    assert rest.calls == 2


def test_images_can_be_read_again(perfect: AdherenceStudy, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(perfect.folder, folder)
    rows = [json.loads(line) for line in (folder / "records.jsonl").read_text("utf-8").splitlines()]
    text = "".join(json.dumps({key: row[key] for key in row if key != "digest"}) + "\n" for row in rows)
    (folder / "records.jsonl").write_text(text.replace('"shape": "', '"shape": "no '), "utf-8")
    study = AdherenceStudy(CONFIG, folder)
    assert figures(study.shown())["all"].right.right == 0
    assert study.read_again() == perfect.shown()
    assert AdherenceStudy(CONFIG, folder).shown() == perfect.shown()


def test_the_report_holds_what_was_counted(perfect: AdherenceStudy) -> None:
    found = study.write_report(perfect)
    held = json.loads((perfect.folder / "figures.json").read_text("utf-8"))
    assert held["objects"]["all"]["right"]["right"] == found["all"].right.right
    assert held["objects"]["2"]["attributes"]["relation"]["count"] == found["2"].right.count
    text = (perfect.folder / "table.md").read_text("utf-8")
    assert f"**{found['all'].right.words}**" in text
    assert "| relation |" in text
    with Image.open(perfect.folder / "random.png") as sheet:
        assert sheet.width > 1500
    failures = found["all"].right.count - found["all"].right.right
    assert (perfect.folder / "failures.png").exists() == bool(failures)


def test_a_sheet_shows_every_image_in_its_own_colour() -> None:
    colours = [(200, 30 * i, 255 - 30 * i) for i in range(7)]
    cards = [Card(Image.new("RGB", (16, 16), c), "a caption " * 12, "wrong", i % 2 == 0) for i, c in enumerate(colours)]
    sheet = contact_sheet(cards, "title", columns=3)
    seen = {colour for _, colour in sheet.getcolors(2**20)}
    assert set(colours) <= seen


def test_tiles_refuse_a_file_of_another_shape(tmp_path: Path) -> None:
    path = sheets.write_tiles([Image.new("RGB", (5, 3), "red")] * 12, tmp_path / "a.png")
    assert [p.size for p in sheets.read_tiles(path, 12)] == [(5, 3)] * 12
    with pytest.raises(PellucidError, match=r"a\.png"):
        sheets.read_tiles(path, 31)


# What is refused


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": 0},
        {"objects": ()},
        {"objects": (4,)},
        {"objects": (1, 1)},
        {"making": {"batch": 0}},
        {"making": {"batch": 257}},
        {"making": {"steps": 0}},
        {"making": {"guidance": float("nan")}},
        {"making": {"seed": -1}},
    ],
)
def test_bad_settings_are_one_line(changes: dict[str, Any]) -> None:
    def make() -> AdherenceConfig:
        return AdherenceConfig("x", **{k: ImageSettings(**v) if k == "making" else v for k, v in changes.items()})

    with pytest.raises(PellucidError) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_folder_of_another_study_or_model_is_refused(perfect: AdherenceStudy, tmp_path: Path) -> None:
    with pytest.raises(PellucidError) as caught:
        AdherenceStudy(replace(CONFIG, prompts=41), perfect.folder)
    assert caught.value.code == "resume-config"
    with pytest.raises(PellucidError) as caught:
        AdherenceStudy(CONFIG, perfect.folder, model_hash="weights-1:other")
    assert caught.value.code == "resume-config"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(PellucidError) as caught:
        AdherenceStudy(CONFIG, tmp_path)
    assert caught.value.code == "out-taken"


def test_nothing_is_written_where_no_image_was_made(tmp_path: Path) -> None:
    def broken(prompt: Any, /, **options: Any) -> Any:
        raise PellucidError("sampler must be a known name.", "unknown-sampler")

    with pytest.raises(PellucidError):
        AdherenceStudy(CONFIG, tmp_path / "out", broken).run()
    assert not (tmp_path / "out").exists()


# A real pipeline


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def test_a_image_does_not_depend_on_its_batch(model: Path, tmp_path: Path) -> None:
    pipe = open_pipe(model, device="cpu")
    prompts = [caption for caption, _ in CONFIG.asked()[:3]]
    making = ImageSettings(steps=2)
    whole = making.images(pipe, prompts, 0)
    alone = making.images(pipe, prompts[2:], 2)
    apart = torch.tensor(list(whole[2].tobytes())).sub(torch.tensor(list(alone[0].tobytes()))).abs().max()
    assert apart <= 1  # kernels of another batch size round otherwise
    assert whole[0].tobytes() != whole[1].tobytes()


@pytest.mark.parametrize("part", ["unet", "dit"])
def test_the_command_runs_and_goes_on(model: Path, tmp_path: Path, part: str, capsys: Any) -> None:
    from pellucid.cli import app

    words = ["study", "adherence", "--model", str(model), "--part", part, "--prompts", "5", "--batch", "3"]
    words += ["--steps", "2", "--out", str(tmp_path / "out"), "--device", "cpu"]
    run(app, [*words, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["part"] == part
    assert found["objects"]["all"]["right"]["count"] == 5
    stamp = (tmp_path / "out" / "pictures" / "00003.png").stat().st_mtime_ns
    run(app, words)
    assert "all right" in capsys.readouterr().out
    assert (tmp_path / "out" / "pictures" / "00003.png").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--objects", "1,x"], "usage"),
        (["--objects", "5"], "scenes-objects"),
        (["--part", "gan"], "part"),
        (["--sampler", "eulr"], "unknown-sampler"),
        (["--batch", "1000"], "making"),
        (["--model", "no/such/model/here"], "not-found"),
        (["--dtype", "float3"], "dtype"),
    ],
)
def test_bad_words_are_one_line(model: Path, tmp_path: Path, words: list[str], code: str, capsys: Any) -> None:
    from pellucid.cli import app

    out = tmp_path / "out"
    asked = [
        "study",
        "adherence",
        "--model",
        str(model),
        "--out",
        str(out),
        "--device",
        "cpu",
        "--prompts",
        "2",
        *words,
    ]
    assert run(app, asked) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert told.err.startswith(f"error[{code}]: ")
    assert not out.exists()


def run(app: Any, words: list[str]) -> Any:
    import typer

    return typer.main.get_command(app).main(words, standalone_mode=False)
