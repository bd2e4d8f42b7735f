"""`pellucid sample --trace` and `pellucid trace`: what they write, what they say, and how they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_scenes import write_model
from trace_runs import denoiser, plan_of, record
from typer.testing import CliRunner

import pellucid
from pellucid.cli import app
from pellucid.evidence import trace
from pellucid.evidence.trace import previews

PROMPT = "a red star"
MAKE = ("--sampler", "dpmpp_2m", "--steps", "4", "--device", "cpu")


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "scenes")


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")

    def run(*args: Any) -> Answer:
        result = CliRunner().invoke(app, [str(arg) for arg in args], prog_name="pellucid")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def tell(ask: Callable[..., Answer]) -> Callable[..., Answer]:
    def run(*args: Any) -> Answer:
        answer = ask(*args)
        assert (answer.code, answer.err) == (0, "")
        return answer

    return run


@pytest.fixture
def refuse(ask: Callable[..., Answer]) -> Callable[..., str]:
    def run(*args: Any) -> str:
        answer = ask(*args)
        assert (answer.code, answer.out, len(answer.err.splitlines())) == (2, "", 1)
        return answer.err

    return run


# --- sample ----------------------------------------------------------------------------------------------------


def test_sample_traces_a_run(tell: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    answer = tell("sample", model, PROMPT, "--seed", 3, *MAKE, "--out", "a.png", "--trace", "a.safetensors")
    assert "traced a.safetensors: pellucid trace show a.safetensors" in answer.out
    found = trace.read(tmp_path / "a.safetensors")
    assert (found.whole, found.header.kept, len(found.steps)) == (True, (), 4)
    assert found.header.recipe == pellucid.pipeline.recipe.read_png(tmp_path / "a.png")
    tell("sample", model, PROMPT, "--seed", 3, *MAKE, "--out", "b.png")
    assert np.array_equal(seen("a.png")[1], seen("b.png")[1])


def test_several_runs_have_numbered_traces(tell: Callable[..., Answer], model: Path, tmp_path: Path) -> None:
    said = tell("sample", model, PROMPT, "-n", 3, *MAKE, "--batch", 2, "--trace", "t.st", "--trace-tensors", "--json")
    assert said.json["traces"] == ["t-001.st", "t-002.st"]
    assert [trace.read(name).header.images for name in said.json["traces"]] == [2, 1]
    assert trace.read("t-001.st").header.kept == ("x", "x0", "eps", "delta")
    tell("sample", model, PROMPT, *MAKE, "--grid-of", "guidance=2,4", "--out", "s.png", "--trace", "s.st")
    scales = [trace.read(f"s-00{k}.st").header.recipes[0]["guidance"]["scale"] for k in (1, 2)]
    assert scales == [2.0, 4.0]


def test_sample_refuses_a_trace_that_it_could_not_write(
    refuse: Callable[..., str], model: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.st").write_text("mine")
    (tmp_path / "m-002.st").write_text("mine")
    make = ("sample", model, PROMPT, *MAKE, "--out", "a.png")
    assert "error[file-exists]: --trace must be a file that does not exist yet" in refuse(*make, "--trace", "t.st")
    assert "error[file]" in refuse(*make, "--trace", "none/t.st")
    assert "error[file]" in refuse(*make, "--trace", "/proc/self/t.st")
    assert "--trace-tensors must come with --trace" in refuse(*make, "--trace-tensors")
    assert "m-002.st" in refuse(*make[:-2], "-n", 2, "--out", "o", "--trace", "m.st")
    assert (tmp_path / "t.st").read_text() == "mine"
    assert not (tmp_path / "a.png").exists()


# --- show ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tell: Callable[..., Answer], model: Path, tmp_path: Path) -> Path:
    """A guided run of two images, with tensors."""
    made = ("sample", model, PROMPT, "--seed", "3,4", "--batch", 2, *MAKE, "--guidance", 5, "--trace", "run.st")
    tell(*made, "--trace-tensors")
    return tmp_path / "run.st"


def test_show_prints_every_step(tell: Callable[..., Answer], run: Path) -> None:
    found = trace.read(run)
    root = np.sqrt(found.header.numbers)
    for index in (None, 1):
        said = tell("trace", "show", run, *([] if index is None else ["--index", index])).out
        rows = [line.split() for line in said.splitlines() if line.strip()[:1].isdigit()]
        assert [int(row[0]) for row in rows] == [0, 1, 2, 3]
        for row, step in zip(rows, found.steps, strict=True):
            values = step.norms["x0"].mean() if index is None else step.norms["x0"][index]
            assert float(row[4]) == pytest.approx(values / root, rel=6e-3)
    assert "2 images of 4 × 8 × 8, float32 · with tensors" in said
    assert repr(PROMPT) in said
    assert "seed 3, 4" in said


def test_show_as_json_holds_everything_but_tensors(tell: Callable[..., Answer], run: Path) -> None:
    said, found = tell("trace", "show", run, "--json").json, trace.read(run)
    assert said["whole"] is True
    assert said["header"]["plan_tables"] == list(found.header.plan_tables)
    for step, own in zip(said["steps"], found.steps, strict=True):
        assert step["norms"]["delta"] == own.norms["delta"].tolist()
        assert step["sigma"] == [level.sigma for level in own.levels]
        assert int(step["digests"]["x"][0], 16) == int(own.digests["x"][0]) % 2**64
    assert said["steps"][0]["local_error"] == [None, None]


def seen(name: str) -> tuple[tuple[int, int], np.ndarray[Any, Any]]:
    """The size of an image, and a small copy of it."""
    with Image.open(name) as found:
        return found.size, np.asarray(found.convert("RGB").resize((300, 200)))


def test_show_draws_the_run(tell: Callable[..., Answer], ask: Callable[..., Answer], run: Path, tmp_path: Path) -> None:
    for name, more in (("a.png", ()), ("b.png", ("--linear", "--index", 1))):
        tell("trace", "show", run, "--plot", name, *more)
    (size, decoded), (_, mapped) = seen("a.png"), seen("b.png")
    assert size[0] > 1000
    assert len(np.unique(decoded.reshape(-1, 3), axis=0)) > 500
    assert not np.array_equal(decoded, mapped)
    record(tmp_path / "bare.st", plan_of(), denoiser(), tensors=False)
    said = ask("trace", "show", "bare.st", "--plot", "d.png")
    told = "note: only the curves are drawn: the trace holds no tensors (--trace-tensors keeps them)"
    assert (said.code, said.err.strip()) == (0, told)
    assert seen("d.png")[0][1] < size[1]


def test_a_trace_whose_model_is_gone_is_mapped(
    ask: Callable[..., Answer], run: Path, model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    made = ask("sample", copy, PROMPT, *MAKE, "--trace", "c.st", "--trace-tensors", "--out", "c.png")
    assert made.code == 0
    shutil.rmtree(copy)
    said = ask("trace", "show", "c.st", "--plot", "p.png")
    assert (said.code, said.err.startswith("note: latents are mapped to colours:")) == (0, True)
    assert ask("trace", "show", "c.st", "--plot", "q.png", "--model", model).err == ""


def test_a_linear_look_is_the_best_affine_map() -> None:
    """Where colours truly are an affine map of latents, the fit finds it, and principal parts span the range."""
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(3, 4, 8, 8, generator=generator)
    table = torch.randn(3, 4, generator=generator).double() * 0.05
    truth = torch.einsum("oc,nchw->nohw", table, x0.double()) + 0.4
    fitted = previews.LinearPreview.fitted(x0, truth)
    assert torch.allclose(fitted.colours(x0), truth.clamp(0, 1), atol=2e-3)
    own = previews.LinearPreview.principal(x0).colours(x0)
    assert own.mean((0, 2, 3)).tolist() == pytest.approx([0.5] * 3, abs=0.02)
    assert (own.std((0, 2, 3)) > 0.15).all()


# --- diff, replay, timeline ------------------------------------------------------------------------------------


def test_diff_names_step_and_cause(ask: Callable[..., Answer], tell: Callable[..., Answer], model: Path) -> None:
    make = ("sample", model, PROMPT, "--seed", 3, *MAKE, "--out", "o", "--trace-tensors")
    for name, more in (("a", ()), ("b", ()), ("c", ("--guidance", 3)), ("d", ("--steps", 5))):
        tell(*make, *more, "--trace", f"{name}.st")
    assert "the same in all of 4 steps" in tell("trace", "diff", "a.st", "b.st").out
    said = ask("trace", "diff", "a.st", "c.st")
    assert (said.code, said.err) == (1, "")
    assert "they diverge at step 0, image 0, by guidance" in said.out
    assert "guidance: 7 + rescale → 3" in said.out
    found = ask("trace", "diff", "a.st", "d.st", "--json")
    assert found.code == 1
    assert (found.json["first"]["cause"], found.json["first"]["step"]) == ("level", 0)
    assert ask("trace", "diff", "a.st", "c.st", "--tolerance", "0.9").code == 0


def test_replay_runs_it_again(
    ask: Callable[..., Answer], tell: Callable[..., Answer], run: Path, model: Path, tmp_path: Path
) -> None:
    said = tell("trace", "replay", run).out
    assert "run again with its model" in said
    assert "the same, bit by bit, in 4 steps of 2 images" in said
    assert tell("trace", "replay", run, "--json").json["same"] is True
    other = pellucid.load(model)
    with torch.no_grad():
        next(other.components.network.parameters()).mul_(1.5)
    other.save(tmp_path / "other")
    said = ask("trace", "replay", run, "--model", tmp_path / "other")
    assert said.code == 1
    assert "they diverge at step 0, image 0 (and 1 image more), by model" in said.out
    assert "weights or settings: network → others" in said.out


def test_replay_of_a_bare_trace(tell: Callable[..., Answer], refuse: Callable[..., str], tmp_path: Path) -> None:
    record(tmp_path / "bare.st", plan_of("euler_a"), denoiser())
    assert "from the predictions that it holds, without a model" in tell("trace", "replay", "bare.st").out
    assert "error[usage]: --model must be left out" in refuse("trace", "replay", "bare.st", "--model", "x")
    record(tmp_path / "numbers.st", plan_of("euler_a"), denoiser(), tensors=False)
    assert "error[trace-tensor]" in refuse("trace", "replay", "numbers.st")


def test_replay_takes_images_again(
    ask: Callable[..., Answer], tell: Callable[..., Answer], refuse: Callable[..., str], model: Path
) -> None:
    Image.linear_gradient("L").resize((16, 16)).convert("RGB").save("in.png")
    make = ("sample", model, PROMPT, *MAKE, "--image", "in.png", "--strength", "0.7", "--out", "o.png")
    tell(*make, "--trace", "t.st")
    assert "--image FILE must be given again" in refuse("trace", "replay", "t.st")
    assert "the same, bit by bit" in tell("trace", "replay", "t.st", "--image", "in.png").out


def test_timeline_is_written(tell: Callable[..., Answer], refuse: Callable[..., str], run: Path) -> None:
    assert "open it in https://ui.perfetto.dev" in tell("trace", "timeline", run, "--out", "run.json").out
    written = json.loads(Path("run.json").read_text())
    assert tell("trace", "timeline", run, "--json").json == written
    assert {event["name"] for event in written["traceEvents"]} >= {"step 3", "denoise", "model", "memory, MB"}
    assert "error[file-type]" in refuse("trace", "timeline", run, "--out", "run.txt")
    assert "error[file]" in refuse("trace", "timeline", run, "--out", "none/run.json")


# --- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "replay", "timeline", "diff"])
def test_bad_traces_are_refused_in_one_line(refuse: Callable[..., str], tmp_path: Path, command: str) -> None:
    record(tmp_path / "good.st", plan_of(), denoiser())
    data = (tmp_path / "good.st").read_bytes()
    (tmp_path / "cut.st").write_bytes(data[: len(data) * 2 // 3])
    (tmp_path / "text.st").write_text("this is no trace")
    more = ["good.st"] if command == "diff" else []
    assert "error[file]" in refuse("trace", command, *more, "absent.st")
    assert "error[trace]: trace must be a file that Pellucid's recorder wrote" in refuse(
        "trace", command, *more, "text.st"
    )
    said = refuse("trace", command, *more, "cut.st")
    assert said.startswith("error[trace-truncated]: trace must be whole; got 'cut.st with ")
    assert "The file was cut: its header promises more." in said
    assert "`pellucid trace show --partial`" in said  # replay has no such option: it names the command that has


def test_what_is_whole_of_a_cut_trace_is_shown(tell: Callable[..., Answer], tmp_path: Path) -> None:
    whole = record(tmp_path / "good.st", plan_of(), denoiser())
    data = (tmp_path / "good.st").read_bytes()
    (tmp_path / "cut.st").write_bytes(data[: len(data) * 2 // 3])
    said = tell("trace", "show", "cut.st", "--partial", "--json").json
    assert said["whole"] is False
    assert 0 < len(said["steps"]) < 6
    assert said["steps"][0]["norms"]["x"] == whole.steps[0].norms["x"].tolist()
    assert f"{len(said['steps'])} of 6 steps, cut" in tell("trace", "show", "cut.st", "--partial").out
    assert "observe" in said["steps"][-2]["seconds"]
    assert "observe" not in said["steps"][-1]["seconds"]  # it did not last until the whole run's end
    rows = [line.split() for line in tell("trace", "show", "cut.st", "--partial").out.splitlines() if " ms " in line]
    assert [row[-2] for row in rows].count("–") == 1
    assert rows[-1][-2] == "–"
    assert "note: B was broken off" in tell("trace", "diff", "good.st", "cut.st", "--partial").out


def test_words_that_make_no_sense(refuse: Callable[..., str], tmp_path: Path) -> None:
    record(tmp_path / "good.st", plan_of(), denoiser())
    assert "error[trace-image]" in refuse("trace", "show", "good.st", "--index", 2)
    assert "must come with --plot" in refuse("trace", "show", "good.st", "--linear")
    assert "error[file-type]" in refuse("trace", "show", "good.st", "--plot", "a.jpg")
    assert "error[usage]" in refuse("trace", "diff", "good.st", "good.st", "--tolerance", "2")
    assert "error[usage]" in refuse("trace", "show")
