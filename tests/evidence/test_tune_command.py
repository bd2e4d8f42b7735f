"""`pellucid tune` on tiny models: a plan that `pellucid sample` runs, and one line for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_scenes import write_model
from typer.testing import CliRunner

import pellucid
from pellucid import PellucidError, Plan
from pellucid.cli import app
from pellucid.cli.tune import show
from pellucid.core.noise import Philox
from pellucid.evidence.tune.model import Pairs, model_of
from pellucid.evidence.tune.teacher import NoisePairs, ends
from pellucid.train.config import read
from pellucid.train.denoiser import DenoiserConfig

PIXELS: dict[str, Any] = {
    "_class_name": "UNet2DModel", "sample_size": 8, "block_out_channels": [8], "layers_per_block": 1,
    "down_block_types": ["DownBlock2D"], "up_block_types": ["UpBlock2D"], "norm_num_groups": 4, "attention_head_dim": 8,
}  # fmt: skip
QUICK = ("--pairs", "4", "--held-out", "4", "--iterations", "2", "--batch", "4", "--teacher", "20", "--steps", "3")
START = ("--start", "unipc-3:trailing")


def write_pixels(folder: Path, classes: int | None = None) -> Path:
    """A UNet of pixels whose answer depends on what it sees and is told."""
    network = PIXELS | ({} if classes is None else {"num_class_embeds": classes})
    table = {"network": network, "objective": {"schedule": {"name": "linear"}, "target": "eps"}}
    table |= {} if classes is None else {"condition": "labels"}
    task = read(DenoiserConfig, table, "task").build(3, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for parameter in task.network.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    task.save(task.network, folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "scenes")
    write_pixels(folder / "pixels")
    write_pixels(folder / "classes", 4)
    return folder


@pytest.fixture
def ask(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")

    def run(model: str, *args: str) -> Any:
        words = ["tune", "--model", str(models / model), "--device", "cpu", *args]
        result = CliRunner().invoke(app, words, prog_name="pellucid")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def tell(ask: Callable[..., Any]) -> Callable[..., str]:
    def run(model: str, *args: str) -> str:
        result = ask(model, *QUICK, *START, *args)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    return run


@pytest.fixture
def refuse(ask: Callable[..., Any]) -> Callable[..., str]:
    def run(model: str, *args: str) -> str:
        result = ask(model, *args)
        assert (result.exit_code, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1
        return result.stderr

    return run


# --- what it makes ---------------------------------------------------------------------------------------------------


def test_pixels_from_words_to_images(tell: Callable[..., str], models: Path, tmp_path: Path) -> None:
    """The plan is written, `sample --plan` runs it, and its image is where the evidence says it is."""
    text = tell("pixels", "--seed", "5")
    assert "held-out pairs" in text
    assert "plan.json" in text
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plan.nfe == 3
    assert plan.deviation < 1e-12
    assert plan.evidence["seeds"] == {"tune": [5, 8], "watch": [9, 12], "judge": [13, 16]}
    words = [
        "sample",
        str(models / "pixels"),
        "--plan",
        "plan.json",
        "--seed",
        "13",
        "--out",
        "o.png",
        "--device",
        "cpu",
    ]
    done = CliRunner().invoke(app, words, prog_name="pellucid")
    assert (done.exit_code, done.exception) == (0, None), done.output
    assert (tmp_path / "o.png").is_file()
    pipe = pellucid.load(models / "pixels", device="cpu")
    subject = model_of(pipe)
    mine = ends(plan, subject, NoisePairs.of(subject, Pairs((13,))), 4)
    torch.testing.assert_close(pipe(plan=plan, seed=13).latents, mine, rtol=0, atol=1e-6)


def test_a_guided_text_model_is_tuned_at_its_guidance(tell: Callable[..., str], models: Path, tmp_path: Path) -> None:
    told = json.loads(tell("scenes", "--prompts", "scenes", "--guidance", "3", "--json"))
    assert told["guidance"] == "3"
    assert told["plan"] == "plan.json"
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    pipe = pellucid.load(models / "scenes", device="cpu", dtype="float32")
    pairs = Pairs((7, 8), ("a red star", "a blue square"))
    for guidance in ("3", "4 + apg momentum=-0.5", None):
        subject = model_of(pipe, guidance)
        mine = ends(plan, subject, NoisePairs.of(subject, pairs), 2)
        made = pipe(list(pairs.prompts or ()), seed=[7, 8], plan=plan, guidance=guidance, decode=False)
        torch.testing.assert_close(mine, made.latents, rtol=0, atol=1e-5)
    assert told["guidance"] != model_of(pipe).guidance  # the guarded default


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torch says of itself when it compiles
def test_a_compiled_network_tunes_alike(tell: Callable[..., str]) -> None:
    """Its steps are the same but for rounding; a few of them do not part."""
    plain, compiled = (json.loads(tell("pixels", "--json", *more)) for more in ((), ("--compile",)))
    assert compiled["held_out"]["tuned"]["mean"] == pytest.approx(plain["held_out"]["tuned"]["mean"], rel=1e-3)


def test_guidance_means_what_it_means_to_sample(tell: Callable[..., str]) -> None:
    told = json.loads(tell("scenes", "--prompts", "scenes", "--guidance", "guarded 9", "--json"))
    assert told["guidance"] == "7 + rescale"


@pytest.mark.parametrize(("doubt", "said"), [(0.2, True), (0.05, False)])
def test_a_teacher_that_is_not_converged_is_said(doubt: float, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"mean": 0.3, "low": 0.2, "high": 0.4, "median": 0.3, "p90": 0.4, "pairs": 4}
    told: dict[str, Any] = {"model": "m", "steps": 8, "what": "all", "guidance": "off", "kept": "tuned"}
    told |= {"start": "a", "best_start": "a", "held_out": {"tuned": row, "start": row}}
    told |= {"teacher": {"steps": 20, "doubt": doubt}}
    made: Any = SimpleNamespace(evidence=told, plan=SimpleNamespace(deviation=0.0))
    show(made, Path("plan.json"))
    assert ("Doubtful: " in capsys.readouterr().out) == said


def test_classes_are_drawn(tell: Callable[..., str], models: Path) -> None:
    told = json.loads(tell("classes", "--json"))
    assert told["kind"] == "pellucid-tune"
    subject = model_of(pellucid.load(models / "classes", device="cpu"))
    assert subject.classes == 4
    drawn = NoisePairs.of(subject, Pairs((0, 0), labels=(0, 1)))
    plan = pellucid.compile_plan("ddim", schedule="linear", steps=3)
    assert not torch.equal(*ends(plan, subject, drawn, 2))


def test_prompts_of_a_file(tell: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("".join(f"a star {i}\n" for i in range(8)))
    assert json.loads(tell("scenes", "--prompts", "p.txt", "--what", "told", "--json"))["what"] == "told"


def test_the_first_noise_is_that_of_sample(models: Path) -> None:
    subject = model_of(pellucid.load(models / "pixels", device="cpu"))
    own = subject.noise(Pairs((3, 9)))
    assert torch.equal(own, Philox([3, 9]).first((3, 8, 8), torch.empty(0), [0, 1]))


def test_the_networks_weights_are_left_alone(models: Path) -> None:
    pipe = pellucid.load(models / "pixels", device="cpu")
    before = {name: value.clone() for name, value in pipe.components.network.state_dict().items()}
    from pellucid.evidence.tune.descent import Descent
    from pellucid.evidence.tune.table import Start
    from pellucid.evidence.tune.tuning import TuningConfig, tune

    how = Descent(iterations=2, batch=4)
    asked = TuningConfig(3, how, 4, 4, 4, (Start.parse("unipc-3:trailing"), Start.parse("dpmpp_2m:trailing")), 20)
    tune(model_of(pipe), asked)
    after = pipe.components.network.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(p.requires_grad or p.grad is not None for p in pipe.components.network.parameters())


# --- what it refuses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "args", "says"),
    [
        ("pixels", ("--steps", "1"), "--steps must be a whole number from 2 to 100; got 1."),
        ("pixels", ("--steps", "500"), "--steps must be a whole number from 2 to 100; got 500."),
        ("pixels", ("--what", "all of it"), "--what must be one of grid, weights, told, both, all"),
        ("pixels", ("--start", "karras"), "--start must be SAMPLER:GRID"),
        ("pixels", ("--start", "nothing:karras"), "sampler must be a known name; got 'nothing'."),
        ("pixels", ("--start", "unipc:nowhere"), "grid must be a known name; got 'nowhere'."),
        ("pixels", ("--start", "euler_a:karras"), "--start must be a deterministic sampler; got 'euler_a'."),
        ("pixels", ("--start", "heun:karras"), "--start must be a sampler with one call per step; got 'heun'."),
        ("pixels", ("--out", "nowhere/plan.json"), "--out must be in a folder that exists"),
        ("pixels", ("--out", "plan.txt"), "--out must be a file that ends in .json"),
        ("pixels", ("--out", "/proc/plan.json"), "--out must be in a folder that can be written to"),
        ("pixels", ("--pairs", "2"), "--pairs must be a whole number from 4"),
        ("pixels", ("--held-out", "0"), "--held-out must be a whole number from 4"),
        ("pixels", ("--teacher", "5"), "--teacher must be from 32 to 2000 steps"),
        ("pixels", ("--iterations", "0"), "iterations must be a whole number from 1"),
        ("pixels", ("--sweep", "8,x"), "--sweep must be whole numbers with commas"),
        ("pixels", ("--records", "r"), "--records must be given with --sweep; got it alone."),
        ("pixels", ("--prompts", "scenes"), "--prompts must be left out: the model takes no text"),
        ("pixels", ("--seed", "-1"), "seed must be a whole number"),
        ("pixels", ("--device", "tpu9"), "device must be one that torch has here"),
        ("scenes", (), "--prompts must be given for a model that takes text; got nothing."),
        ("scenes", ("--prompts", "none.txt"), "prompts must be a text file that exists, or scenes"),
        ("nothing", (), "nothing"),
    ],
)
def test_bad_input_is_one_line(refuse: Callable[..., str], model: str, args: tuple[str, ...], says: str) -> None:
    assert says in refuse(model, *args)


def test_a_plan_that_was_there_is_replaced_only_where_that_is_asked_for(
    refuse: Callable[..., str], tell: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "plan.json").write_text("mine")
    refuse("pixels", "--overwrite", "--steps", "1")
    assert "--out must be a file that does not exist yet" in refuse("pixels", *QUICK, *START)
    assert (tmp_path / "plan.json").read_text() == "mine"
    tell("pixels", "--overwrite")
    assert Plan.from_json((tmp_path / "plan.json").read_text()).nfe == 3


def test_weights_that_are_not_there_cannot_be_tuned_for(models: Path) -> None:
    pipe = pellucid.load(models / "pixels", device="cpu")
    object.__setattr__(pipe, "policy", pellucid.Policy(offload="component"))
    with pytest.raises(PellucidError, match="offload must be none"):
        model_of(pipe)
