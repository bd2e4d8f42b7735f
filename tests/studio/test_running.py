"""Work beside the page: runs and their moments, cancelling, people who come and go, models on the shelf."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from pellucid.core.errors import Cancelled, PellucidError
from pellucid.evidence.trace import reading
from pellucid.pipeline.load import load
from pellucid.pipeline.pipeline import Pipeline
from pellucid.pipeline.recipe import read_png
from pellucid.studio import generate_tab, visitors
from pellucid.studio.doctor_tab import MODEL, DoctorForm
from pellucid.studio.form import HELD, Form, Shelf, adapter
from pellucid.studio.generate_tab import Preview, RunResult, StepNews
from pellucid.studio.visitors import KEPT, Job, Session, Sessions

SETUP = Form(prompt="a red star", sampler="euler", seed="7", steps=4)


@pytest.fixture(scope="module")
def pipe(small: Path) -> Pipeline:
    return load(small, device="cpu")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def follow(pipe: Pipeline, form: Form, session: Session, tab: str) -> Iterator[Any]:
    return session.follow(tab, lambda job: generate_tab.run(pipe, form, session, job))


# Jobs


def test_a_job_tells_its_news_and_ends_with_its_result() -> None:
    job = visitors.begin(lambda job: [job.tell(i) for i in range(3)] and "done")
    told = list(visitors.follow(job))
    assert told[-1] == 2  # the newest is never passed over
    assert told == sorted(told)
    assert job.result == "done"


def test_a_job_s_error_reaches_who_follows() -> None:
    def fail(job: Job) -> None:
        raise PellucidError("steps must be 1; got 2.", "steps")

    with pytest.raises(PellucidError, match="steps must be 1"):
        list(visitors.follow(visitors.begin(fail)))


def test_work_stops_when_its_follower_goes_away() -> None:
    stopped = threading.Event()

    def work(job: Job) -> None:
        while not job.cancelled():
            job.tell("news")
            time.sleep(0.005)
        stopped.set()

    follower = visitors.follow(visitors.begin(work))
    assert next(follower) == "news"
    follower.close()
    assert stopped.wait(5)


# Runs


def test_a_run_shows_its_moments_and_leaves_a_image_with_its_recipe_and_a_trace(
    pipe: Pipeline, session: Session
) -> None:
    *moments, made = follow(pipe, SETUP, session, "generate")
    assert isinstance(made, RunResult)
    assert all(isinstance(moment, StepNews) for moment in moments)
    assert moments[-1].step == moments[-1].steps == 4
    assert moments[-1].words.startswith("step 4 of 4")
    assert read_png(made.file) == made.recipe
    assert made.recipe.seed == 7
    trace = reading.read(made.trace)
    assert len(trace.steps) == 4
    assert trace.has("delta", 0)
    assert torch.equal(trace.tensor("x0", 3)[:1], moments[-1].x0)
    with Image.open(made.file) as image:
        assert image.size == made.image.size


def test_a_cancelled_run_ends_at_its_next_step(pipe: Pipeline, session: Session) -> None:
    follower = follow(pipe, Form(prompt="x", steps=400), session, "generate")
    next(follower)
    session.cancel("generate")
    with pytest.raises(Cancelled):
        list(follower)


def test_a_second_run_of_a_tab_stops_the_first(pipe: Pipeline, session: Session) -> None:
    first = follow(pipe, Form(prompt="x", steps=400), session, "generate")
    next(first)
    *_, made = follow(pipe, SETUP, session, "generate")
    assert isinstance(made, RunResult)
    with pytest.raises(Cancelled):
        list(first)


def test_two_people_get_the_images_that_one_would(pipe: Pipeline, tmp_path: Path) -> None:
    one = Session(tmp_path)
    alone = [list(follow(pipe, setup(seed), one, "a"))[-1].image for seed in (1, 2)]
    sessions = [Session(tmp_path / name) for name in ("one", "two")]
    for session in sessions:
        session.folder.mkdir()
    both = [follow(pipe, setup(seed), session, "a") for seed, session in zip((1, 2), sessions, strict=True)]
    for follower in both:
        next(follower)  # both are under way
    together = [list(follower)[-1].image for follower in both]
    assert [p.tobytes() for p in together] == [p.tobytes() for p in alone]


def setup(seed: int) -> Form:
    return Form(prompt="a red star", sampler="euler", seed=str(seed), steps=6)


def test_a_preview_is_a_image_by_the_vae_or_by_a_map(pipe: Pipeline) -> None:
    x0 = torch.randn(1, 4, 8, 8)
    quick = Preview(pipe)
    quick.warm()
    assert quick.image(x0).size == (16, 16)  # decoded
    slow = Preview(pipe)
    slow.image(x0)
    slow.quick = False
    assert slow.image(x0).size == (8, 8)  # mapped


# People and models


def test_a_person_keeps_the_last_runs_and_leaves_nothing(tmp_path: Path) -> None:
    sessions = Sessions()
    one, two = sessions.of("one"), sessions.of("two")
    assert one is sessions.of("one")
    assert one.folder != two.folder
    for i in range(KEPT + 3):
        path = one.new_file(".trace")
        path.write_bytes(b"x")
        one.keep(str(i), path)
    assert list(one.runs) == [str(i) for i in range(3, KEPT + 3)]
    assert len(list(one.folder.iterdir())) == KEPT
    job = one.begin("generate", lambda job: job.stop.wait(20))
    sessions.end("one")
    assert job.cancelled()
    assert not one.folder.exists()
    assert two.folder.exists()
    sessions.end_all()
    assert not two.folder.exists()


def test_a_shelf_loads_once_and_holds_few(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr("pellucid.studio.form.load", lambda name, device: loaded.append(name) or object())
    shelf = Shelf(["me/a", "me/b"])
    assert shelf.choices()[:2] == ["me/a", "me/b"]
    assert shelf.pipe("me/a") is shelf.pipe(" me/a ")
    shelf.pipe("me/b")
    shelf.pipe("me/c")
    assert len(shelf.held) == HELD
    assert loaded == ["me/a", "me/b", "me/c"]


def test_who_asks_for_a_model_does_not_wait_for_another_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, free, count = threading.Event(), threading.Event(), [0]

    def slow(name: str, device: str | None) -> object:
        count[0] += 1
        if name == "me/large":
            begun.set()
            free.wait(20)
        return object()

    monkeypatch.setattr("pellucid.studio.form.load", slow)
    shelf, got = Shelf(), []
    small = shelf.pipe("me/small")
    people = [threading.Thread(target=lambda: got.append(shelf.pipe("me/large"))) for _ in range(2)]
    for one in people:
        one.start()
    assert begun.wait(5)
    assert shelf.pipe("me/small") is small  # while the other loads
    free.set()
    for one in people:
        one.join(5)
    assert got[0] is got[1]
    assert count == [2]


@pytest.mark.parametrize("name", ["", None, "no/such/folder at all", "tests"])
def test_what_is_no_model_is_one_line(name: str | None) -> None:
    with pytest.raises(PellucidError) as caught:
        Shelf().pipe(name)
    assert "\n" not in str(caught.value)


def secrets_in(folder: Path) -> list[Path]:
    """Files and folders that are nobody's business, one that is not there, and one that must not be opened."""
    places = [folder / name for name in ("passwd", "notes.json", "letter.docx", "home", "queue", "none")]
    places[0].write_bytes(b"root:x:0:0:hidden")
    places[1].write_text('{"hidden": "key"}', "utf-8")
    places[2].write_bytes(b"PK\x03\x04hidden")
    (places[3] / "hidden").mkdir(parents=True)
    os.mkfifo(places[4])
    return places


def said_of(ask: Callable[[str], object], place: Path) -> str:
    with pytest.raises(PellucidError) as caught:
        ask(str(place))
    return str(caught.value).replace(str(place), "…")


def test_of_what_is_no_model_nothing_is_told(tmp_path: Path) -> None:
    places = secrets_in(tmp_path)

    def look(name: str) -> object:
        return DoctorForm(MODEL, name).given(tmp_path)

    for ask in (Shelf().pipe, look, partial(adapter, what="LoRA")):
        said = {said_of(ask, place) for place in places}
        assert len(said) == 1
        assert "hidden" not in said.pop()


def test_what_looks_like_a_model_is_described(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "KarrasVePipeline", "unet": ["diffusers", "X"]}', "utf-8"
    )
    assert "got KarrasVePipeline" in said_of(Shelf().pipe, tmp_path)
    weights = tmp_path / "cut.safetensors"
    weights.write_bytes((2**20).to_bytes(8, "little") + b'{"a":')
    assert "cut.safetensors" in said_of(Shelf().pipe, weights)
    assert adapter(f" {weights} ", "LoRA") == str(weights)
    pointer = tmp_path / "model.safetensors"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "git lfs pull" in said_of(Shelf().pipe, pointer)
