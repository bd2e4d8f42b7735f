"""Nothing that exists is replaced unasked: one rule for every option that writes a file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from PIL import Image

from pellucid.cli import app, lab, output, sample_run
from pellucid.core.compile import compile_plan
from pellucid.core.errors import PellucidError
from pellucid.core.loop import run
from pellucid.core.oracle import ring
from pellucid.evidence.trace.recorder import Recorder
from pellucid.pipeline.recipe import Recipe

# (command, option) → the file, and the words with which the command would come to write it. Models that are not there
# show that a file is looked at before a model is: `refused` must speak of the file, and --overwrite of the model.
WRITES = {
    ("sample", "--out"): ("star.png", ["none-such", "a star", "--out", "star.png"]),
    ("sample", "--trace"): ("run.st", ["none-such", "a star", "--trace", "run.st"]),
    ("plan", "--plot"): ("plan.png", ["euler", "--steps", "3", "--plot", "plan.png"]),
    ("plan", "--save"): ("plan.json", ["euler", "--steps", "3", "--save", "plan.json"]),
    ("schedules", "--plot"): ("curves.png", ["linear", "--plot", "curves.png"]),
    ("inspect", "--plot"): ("graph.png", ["none-such", "--plot", "graph.png"]),
    ("memory", "--plot"): ("bars.png", ["none-such", "--plot", "bars.png"]),
    ("tune", "--out"): ("tuned.json", ["--model", "none-such", "--out", "tuned.json"]),
    ("score", "--save"): ("mine.safetensors", ["none-such", "--save", "mine.safetensors"]),
    ("bench-serve", "--out"): ("out/bench-serve.json", ["http://127.0.0.1:9", "--out", "out"]),
    ("lab", "--starter"): ("answer.py", ["1", "--starter", "answer.py"]),
    ("lab", "--out"): ("figures/02.png", ["1", "--out", "figures"]),
    ("demo", "--out"): ("board.png", ["--out", "board.png"]),
    ("trace show", "--plot"): ("strip.png", ["run.trace", "--plot", "strip.png"]),
    ("trace timeline", "--out"): ("run.json", ["run.trace"]),  # its name when none is given
    ("data scenes", "--out"): ("sheet.png", ["--count", "2", "--out", "sheet.png"]),
}
STUDIES = ("schedules", "adherence", "guidance", "oracle", "samplers", "interaction")
# A folder that a run or a study owns: it goes on in it, and refuses one of another.
OWNED = {
    ("train", "--out"), ("tune", "--records"), ("serve", "--records"), ("data scenes", "--folder"),
    ("data latents", "--out"),
    *((f"study {name}", "--out") for name in STUDIES),
}  # fmt: skip
NAMES = {"--out", "--save", "--plot", "--starter", "--trace", "--records", "--folder"}  # no others write
QUICK = [  # written here in full
    ("plan", "--plot"), ("plan", "--save"), ("schedules", "--plot"), ("lab", "--starter"), ("trace show", "--plot"),
    ("trace timeline", "--out"), ("data scenes", "--out"),
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a trace in it."""
    with Recorder(tmp_path / "run.trace") as recorder:
        run(compile_plan("euler", steps=2), ring(), shape=(2,), observers=[recorder])
    return tmp_path


def commands(group, before=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        else:
            yield " ".join((*before, name)), command


def test_every_option_that_writes_is_known_here_and_has_its_way_out():
    found = {name: [word for param in command.params for word in param.opts] for name, command in commands(
        typer.main.get_command(app)
    )}  # fmt: skip
    writing = {(name, word) for name, words in found.items() for word in words if word in NAMES}
    assert writing - {("doctor", "--trace")} == WRITES.keys() | OWNED  # the doctor reads one
    assert [name for name, _ in WRITES if "--overwrite" not in found[name]] == []


@pytest.mark.parametrize(("command", "option"), WRITES)
def test_a_file_that_is_there_is_refused_before_the_work_and_kept(refuse, place, command, option):
    name, words = WRITES[command, option]
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text("mine")
    line = refuse(*command.split(), *words)
    assert line == f"error[file-exists]: {option} must be a file that does not exist yet; got {name!r}. " + (
        "Name another, or give --overwrite."
    )
    assert (place / name).read_text() == "mine"


@pytest.mark.parametrize(("command", "option"), sorted(WRITES.keys() - {*QUICK, ("lab", "--out"), ("demo", "--out")}))
def test_with_overwrite_the_work_begins(refuse, place, command, option):
    name, words = WRITES[command, option]
    (place / name).parent.mkdir(exist_ok=True)
    (place / name).write_text("mine")
    assert "file-exists" not in refuse(*command.split(), *words, "--overwrite")


@pytest.mark.parametrize(("command", "option"), QUICK)
def test_a_file_is_named_when_it_is_written_and_replaced_when_asked(ask, place, command, option):
    name, words = WRITES[command, option]
    assert f"wrote {name}" in ask(*command.split(), *words).out
    written = (place / name).read_bytes()
    (place / name).write_text("mine")
    assert f"wrote {name}" in ask(*command.split(), *words, "--overwrite").out
    assert len((place / name).read_bytes()) == pytest.approx(len(written), abs=16)
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "euler"],
        ["schedules"],
        ["inspect", "none-such"],
        ["memory", "none-such"],
        ["score", "none-such", "--against", "none-such"],
        ["lab"],
        ["lab", "1", "--check", "answer.py"],
        ["trace", "show", "run.trace"],
        ["trace", "timeline", "run.trace", "--json"],
        ["data", "scenes", "--folder", "new"],
    ],
    ids=" ".join,
)
def test_overwrite_without_a_file_to_write_is_refused(refuse, place, words):
    assert refuse(*words, "--overwrite").startswith("error[usage]: --overwrite must come with ")


def test_with_json_the_file_is_named_on_stderr(ask, place):
    answer = ask("plan", "euler", "--steps", "3", "--json", "--save", "plan.json")
    assert (answer.code, answer.err) == (0, "wrote plan.json\n")
    assert answer.json["kind"] == "pellucid-plan"


def test_a_link_to_nothing_is_something_that_exists(refuse, place):
    os.symlink(place / "elsewhere.json", place / "plan.json")
    assert "error[file-exists]" in refuse("plan", "euler", "--save", "plan.json")
    assert not (place / "elsewhere.json").exists()


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_came_during_the_work_is_kept(tmp_path, monkeypatch, links):
    def no_links(*_):
        raise PermissionError("not on this file system")

    if not links:
        monkeypatch.setattr(os, "link", no_links)
    goal = output.destination(tmp_path / "plan.json", "--save")
    (tmp_path / "plan.json").write_text("mine")
    with pytest.raises(PellucidError, match="--overwrite") as caught:
        goal.write("new")
    assert caught.value.code == "file-exists"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("plan.json", "mine")]
    output.destination(tmp_path / "plan.json", "--save", overwrite=True).write("new")
    other = output.destination(tmp_path / "other.json", "--save")
    for text in ("first", "other"):  # its own file it may write again, as `tune --sweep` does
        other.write(text)
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["new", "other"]


def test_a_name_of_ours_that_was_taken_meanwhile_gets_the_next_number(tmp_path, monkeypatch):
    goal, real = sample_run.OutputPaths(tmp_path), sample_run.OutputPaths.path

    def taken_at_once(self, *words):
        path = real(self, *words)
        if path.name == "out-7.png":
            path.write_text("theirs")
        return path

    monkeypatch.setattr(sample_run.OutputPaths, "path", taken_at_once)
    assert goal.keep(Image.new("RGB", (4, 4)), Recipe(seed=7), None, []).name == "out-7-2.png"
    assert (tmp_path / "out-7.png").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-7-2.png", "out-7.png"]
    with pytest.raises(PellucidError, match="does not exist yet"):
        replace(goal, file=tmp_path / "out-7.png").keep(Image.new("RGB", (4, 4)), Recipe(seed=7), None, [])


def test_figures_of_a_lab_go_into_the_next_folder_that_is_free(tmp_path):
    ours = lab.FigureFolder(tmp_path / "03", overwrite=False)
    for name in ("03", "03-2", "03-3"):
        assert ours.free().folder.name == name
        (tmp_path / name).mkdir()
        assert ours.free().folder.name == name  # a folder without figures
        (tmp_path / name / "05_2.png").touch()
    assert replace(ours, overwrite=True).free().folder.name == "03"


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path):
    def full(part):
        part.write_text("half")
        raise OSError(28, "No space left on device", str(part))

    goal = output.destination(tmp_path / "plan.json", "--save")
    with pytest.raises(PellucidError) as caught:
        goal.write(full)
    assert str(caught.value) == (
        f"--save must be a file that can be written; got {str(tmp_path / 'plan.json')!r}. No space left on device."
    )
    assert list(tmp_path.iterdir()) == []
