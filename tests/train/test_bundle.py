"""A bundle of finished runs: float16, shared parts once, whole or not at all, always the same bytes; and its card."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_bundle
import torch
from safetensors.torch import load_file, save_file

import pellucid
from pellucid import PellucidError
from pellucid.interop.source import load_image_encoder
from pellucid.pipeline.shelf import adapter_encoder
from pellucid.train import bundle
from pellucid.train.bundle import BundleRuns, ModelCard, assemble
from pellucid.train.config import TrainConfig
from pellucid.train.kinds import TASKS

ROOT = Path(__file__).parents[2]
PROMPT = "a large red star on a white background"


@pytest.fixture
def parts() -> BundleRuns:
    return BundleRuns(**tiny_bundle.runs())


@pytest.fixture
def made() -> Path:
    return tiny_bundle.bundles() / tiny_bundle.NAME


def copied(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / run.name))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(call: object, *args: object, **kwargs: object) -> tuple[str, str]:
    with pytest.raises(PellucidError) as error:
        call(*args, **kwargs)  # type: ignore[operator]
    assert "\n" not in str(error.value)
    return error.value.code, str(error.value)


# --- what is written ----------------------------------------------------------------------------------------------


def test_every_weight_is_that_of_its_run_in_float16(parts: BundleRuns, made: Path) -> None:
    runs = parts.given()
    places = {
        **{part: runs["base"] / "model" / part for part in ("unet", "vae", "text_encoder")},
        "dit/transformer": runs["dit"] / "model" / "transformer",
        **{part: runs[part] / "model" for part in ("controlnet", "ip_adapter", "lora", "image_text")},
    }
    weights = {path.relative_to(made) for path in made.rglob("*.safetensors")}
    assert {str(path.parent) for path in weights} == set(places)
    for path in weights:
        mine, theirs = load_file(made / path), load_file(places[str(path.parent)] / path.name)
        assert mine.keys() == theirs.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == (torch.float16 if theirs[name].is_floating_point() else theirs[name].dtype)
            assert torch.equal(tensor, theirs[name].to(tensor.dtype))
        assert (made / path).stat().st_mode & 0o777 == 0o644  # others may read it


def test_the_dit_shares_the_parts_of_the_base_and_is_a_pipeline_of_its_own(parts: BundleRuns, made: Path) -> None:
    """Loaded from the bundle it is what its run saved whole, rounded to float16."""
    held = {path.name for path in (made / "dit").iterdir()}
    assert held == {"model_index.json", "transformer", "scheduler"}
    shared, base = pellucid.load(made / "dit", dtype="float32"), pellucid.load(made, dtype="float32")
    whole = pellucid.load(parts.given()["dit"] / "model", dtype="float16")
    for name in ("network", "vae"):
        mine, theirs = (getattr(pipe.components, name).state_dict() for pipe in (shared, whole))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key].to(mine[key].dtype)) for key in mine)
    assert (shared.components.target, base.components.target) == ("eps", "v")
    assert shared.components.scheduler == whole.components.scheduler
    assert shared(PROMPT, steps=2, seed=1).images[0].size == (128, 128)


def test_the_ip_adapter_shares_the_eyes_of_the_image_text_encoder_if_they_are_the_same(
    parts: BundleRuns, made: Path, tmp_path: Path
) -> None:
    """Whichever way, what it sees with is what it was trained with, rounded to float16."""
    trained = load_image_encoder(parts.given()["ip_adapter"] / "model" / "image_encoder", dtype="float16").state_dict()

    def sees_as_trained(folder: Path) -> bool:
        eyes = adapter_encoder(folder / "ip_adapter")
        assert eyes is not None
        mine = load_image_encoder(eyes).state_dict()
        return mine.keys() == trained.keys() and all(torch.equal(mine[name], trained[name]) for name in mine)

    assert {path.name for path in (made / "ip_adapter").iterdir()} == {"ip_adapter.safetensors", "image_encoder.json"}
    assert sees_as_trained(made)
    other = copied(parts.given()["image_text"], tmp_path)
    tensors = load_file(other / "model" / "model.safetensors")
    tensors["visual_projection.weight"][0, 0] += 0.01
    save_file(tensors, other / "model" / "model.safetensors", {"format": "pt"})
    for name, judge in (("another", other), ("none", None)):
        assemble(BundleRuns(parts.base, ip_adapter=parts.ip_adapter, image_text=judge), tmp_path / name)
        held = {path.name for path in (tmp_path / name / "ip_adapter").iterdir()}
        assert held == {"ip_adapter.safetensors", "image_encoder"}
        assert sees_as_trained(tmp_path / name)


def test_diffusers_sees_with_the_image_text_encoder_too(made: Path) -> None:
    import diffusers

    peer = diffusers.StableDiffusionPipeline.from_pretrained(made, dtype=torch.float32)
    peer.load_ip_adapter(
        str(made), subfolder="ip_adapter", weight_name="ip_adapter.safetensors", image_encoder_folder="./image_text"
    )
    mine = load_image_encoder(made / "image_text", dtype="float32")
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(peer.image_encoder(pixels).image_embeds, mine(pixels).pooled, atol=1e-5)


def test_diffusers_opens_the_base_and_makes_the_same_image(made: Path) -> None:
    import diffusers
    import numpy as np

    peer = diffusers.StableDiffusionPipeline.from_pretrained(made, dtype=torch.float32)
    peer.set_progress_bar_config(disable=True)
    theirs = peer(PROMPT, num_inference_steps=4, guidance_scale=4.0, generator=torch.Generator().manual_seed(3)).images
    mine = pellucid.load(made, dtype="float32")(PROMPT, steps=4, guidance=4.0, seed=3).images
    apart = np.abs(np.asarray(theirs[0]).astype(int) - np.asarray(mine[0]).astype(int))
    assert np.asarray(theirs[0]).std() > 1  # it shows something
    assert apart.max() <= 2  # of 255


def test_diffusers_opens_the_dit_with_the_parts_of_the_base(made: Path) -> None:
    import diffusers

    base = diffusers.StableDiffusionPipeline.from_pretrained(made)
    given = {name: getattr(base, name) for name in ("vae", "text_encoder", "tokenizer")}
    peer = diffusers.PixArtAlphaPipeline.from_pretrained(made / "dit", **given)
    mine, theirs = (
        load_file(made / "dit/transformer/diffusion_pytorch_model.safetensors"),
        peer.transformer.state_dict(),
    )
    assert all(torch.equal(mine[name].float(), theirs[name].float()) for name in mine)


def test_the_same_runs_make_the_same_bytes(parts: BundleRuns, made: Path, tmp_path: Path) -> None:
    card = write_card(tmp_path)
    for name in ("one", "two"):
        assemble(parts, tmp_path / name, card)
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one == two
    assert {**files(made), "README.md": one["README.md"]} == one


def test_parts_that_are_not_given_are_left_out(parts: BundleRuns, tmp_path: Path) -> None:
    sizes = assemble(BundleRuns(parts.base, lora=parts.lora), tmp_path / "small")
    assert list(sizes) == ["base", "lora"]
    assert sum(sizes.values()) == sum(len(held) for held in files(tmp_path / "small").values())
    top = {path.name for path in (tmp_path / "small").iterdir()}
    assert top == {"model_index.json", "unet", "vae", "text_encoder", "tokenizer", "scheduler", "lora"}


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "what"), [("_MOST_BASE", "base"), ("_MOST_ALL", "bundle")])
def test_too_many_bytes_are_refused_and_leave_nothing(
    parts: BundleRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, what: str
) -> None:
    monkeypatch.setattr(bundle, limit, 100_000)
    code, words = refusal(assemble, parts, tmp_path / "new")
    assert code == "bundle-size"
    assert re.match(rf"{what} must be at most 0\.1 MB; got [\d.]+ MB \(base [\d.]+, dit [\d.]+, controlnet ", words)
    assert list(tmp_path.iterdir()) == []


def test_an_older_bundle_stays_when_the_new_one_fails(parts: BundleRuns, tmp_path: Path, made: Path) -> None:
    old = Path(shutil.copytree(made, tmp_path / "old"))
    assert refusal(assemble, parts, old)[0] == "save"  # not without overwrite
    broken = copied(parts.given()["lora"], tmp_path / "runs")
    (broken / "model" / "pytorch_lora_weights.safetensors").write_bytes(b"no")
    before = files(old)
    refusal(assemble, replace(parts, lora=broken), old, overwrite=True)
    assert files(old) == before
    assert {path.name for path in tmp_path.iterdir()} == {"old", "runs"}
    assemble(BundleRuns(parts.base), old, overwrite=True)
    assert not (old / "lora").exists()


def test_parts_that_do_not_belong_together(parts: BundleRuns, tmp_path: Path) -> None:
    def changed(run: Path, part: str) -> Path:
        run = copied(run, tmp_path / f"{run.name}-{part or 'model'}")
        (path,) = (run / "model" / part).glob("*.safetensors")
        tensors = load_file(path)
        first = min(tensors)
        save_file({**tensors, first: tensors[first] + 1e-3}, path, {"format": "pt"})
        return run

    runs = parts.given()
    for name, one in (
        ("vae of base", replace(parts, vae=changed(runs["vae"], ""))),
        ("vae of dit", replace(parts, dit=changed(runs["dit"], "vae"))),
        ("text_encoder of dit", replace(parts, dit=changed(runs["dit"], "text_encoder"))),
    ):
        code, words = refusal(assemble, one, tmp_path / "new")
        assert (code, words.startswith(f"{name} must be that of")) == ("bundle-fit", True)


@pytest.mark.parametrize(
    ("part", "run", "code"),
    [
        ("base", "dit", "bundle-part"),
        ("dit", "base", "bundle-part"),
        ("controlnet", "vae", "bundle-part"),
        ("ip_adapter", "lora", "bundle-part"),
        ("lora", "ip_adapter", "bundle-part"),
        ("image_text", "vae", "bundle-part"),
    ],
)
def test_a_run_of_something_else(parts: BundleRuns, tmp_path: Path, part: str, run: str, code: str) -> None:
    assert refusal(assemble, replace(parts, vae=None, **{part: parts.given()[run]}), tmp_path / "new")[0] == code
    assert not (tmp_path / "new").exists()


def test_a_run_that_is_not_finished_and_weights_beyond_float16(parts: BundleRuns, tmp_path: Path) -> None:
    assert refusal(assemble, replace(parts, dit=tmp_path), tmp_path / "new")[0] == "bundle-run"
    wide = copied(parts.given()["controlnet"], tmp_path)
    path = wide / "model" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "conv_in.bias": tensors["conv_in.bias"] + 1e6}, path, {"format": "pt"})
    code, words = refusal(assemble, replace(parts, controlnet=wide), tmp_path / "new")
    assert code == "bundle-range"
    assert "conv_in.bias of controlnet/" in words


# --- the card -----------------------------------------------------------------------------------------------------


def write_card(folder: Path, text: str = "# A\n$sizes\n$runs\n$figures\n$recipes\n") -> ModelCard:
    (folder / "card.md").write_text(text, encoding="utf-8")
    found = {"one object": {"right": 0.951, "interval": [0.93, 0.97]}, "images": 1000}
    (folder / "prompt_adherence.json").write_text(json.dumps(found), encoding="utf-8")
    return ModelCard(folder / "card.md", (folder / "prompt_adherence.json",), "one GPU")


def test_the_card_says_sizes_times_figures_and_recipes(parts: BundleRuns, tmp_path: Path) -> None:
    sizes = assemble(BundleRuns(parts.base, parts.vae), tmp_path / "new", write_card(tmp_path))
    card = (tmp_path / "new" / "README.md").read_text("utf-8")
    assert sizes["base"] > len(card)
    assert re.search(r"^\| base \| [\d.]+ M \| 40 \| 8 \| 0\.00 \| 0\.3 \| 0\.025 \|$", card, re.M)  # 20 seconds
    assert "Together 0.7 minutes of training on one GPU." in card
    assert "### prompt adherence" in card
    assert "| one object · right | 0.951 |" in card
    assert "| one object · interval | 0.93, 0.97 |" in card
    recipes = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", card, re.S)]
    assert [recipe["task"]["kind"] for recipe in recipes] == ["scenes_text_unet_layout", "scenes_vae"]


def test_templates_and_files_that_cannot_be(parts: BundleRuns, tmp_path: Path) -> None:
    odd = write_card(tmp_path, "costs $5 and $other")
    assert refusal(assemble, parts, tmp_path / "new", odd)[0] == "card-template"
    assert refusal(assemble, parts, tmp_path / "new", ModelCard(tmp_path / "none.md"))[0] == "card-file"
    bare = copied(parts.base, tmp_path)
    (bare / "log.jsonl").unlink()
    assert refusal(assemble, BundleRuns(bare), tmp_path / "new", write_card(tmp_path))[0] == "card-file"
    assert not (tmp_path / "new").exists()


# --- the recipe ---------------------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """recipes/make_bundle.py as a command: its exit code, and what it printed."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["make_bundle.py", *args])
        code = runpy.run_path(str(ROOT / "recipes" / "make_bundle.py"))["main"]()
        return code, *capsys.readouterr()

    return run


def test_the_script_makes_the_bundle_of_the_runs(
    parts: BundleRuns, made: Path, tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    code, out, err = script("--runs", str(parts.base.parent), "--out", str(tmp_path / "new"), "--hardware", "a CPU")
    assert (code, err) == (0, "")
    found = files(tmp_path / "new")
    card = found.pop("README.md").decode()
    assert found == files(made)
    assert card.startswith("# scenes-128\n")
    assert "$" not in card
    assert str(ROOT) not in card
    assert re.search(r"^all +[\d.]+ MB", out, re.M)


def test_the_script_without_runs_says_so_in_a_line(tmp_path: Path, script: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = script("--runs", str(tmp_path), "--out", str(tmp_path / "new"))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error\[bundle-run\]: .*scenes_text_unet_layout must be a finished run; it is not\.\n", err)


def test_the_recipes_run_in_an_order_in_which_each_finds_what_it_needs() -> None:
    script = (ROOT / "recipes" / "scenes_128.sh").read_text("utf-8")
    order = re.search(r'^ALL="(.*)"$', script, re.M)[1].split()  # type: ignore[index]
    configs = sorted(path.stem.removeprefix("scenes_") for path in (ROOT / "configs").glob("scenes_*.toml"))
    assert sorted(order) == configs
    for i, name in enumerate(order):
        text = (ROOT / "configs" / f"scenes_{name}.toml").read_text("utf-8")
        for needed in re.findall(r'"runs/scenes_(\w+)/model"', text):
            assert needed in order[:i]
        assert TrainConfig.load(ROOT / "configs" / f"scenes_{name}.toml").task["kind"] in TASKS
    assert subprocess.run(["sh", "-n", str(ROOT / "recipes" / "scenes_128.sh")], check=False).returncode == 0
