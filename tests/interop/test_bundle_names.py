"""A bundle and its parts go by name, from Python and on the command line, and no name leads out of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_bundle
import torch
from PIL import Image
from typer.testing import CliRunner

import pellucid
from pellucid import Control, ImagePrompt, Lora, PellucidError
from pellucid.cli import app
from pellucid.evidence.study.setups import SamplerSetup
from pellucid.interop import hub, source
from pellucid.interop.folder import SHARED
from pellucid.interop.save import save_component
from pellucid.pipeline.prepare import read_plan
from pellucid.pipeline.shelf import ENCODER_NOTE, adapter_encoder

PROMPT = "a large red star on a white background"
MADE = {"steps": 2, "seed": 3, "sampler": "euler"}


@pytest.fixture(autouse=True)
def bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    monkeypatch.setattr(source, "BUNDLES", tiny_bundle.bundles())
    monkeypatch.setattr(hub, "fetch", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    return tiny_bundle.bundles() / tiny_bundle.NAME


def refusal(call: object, *args: object) -> tuple[str, str]:
    with pytest.raises(PellucidError) as error:
        call(*args)  # type: ignore[operator]
    assert "\n" not in str(error.value)
    return error.value.code, str(error.value)


def edges(path: Path) -> Path:
    Image.linear_gradient("L").resize((128, 128)).point(lambda v: 255 * (v > 127)).convert("RGB").save(path)
    return path


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["", "/dit", "/controlnet", "/image_text", "/lora/pytorch_lora_weights.safetensors"])
def test_parts_lie_where_their_names_say(bundle: Path, part: str) -> None:
    assert source.locate(f"scenes-128{part}") == bundle / part.removeprefix("/")


@pytest.mark.parametrize(
    "part", ["..", "../..", ".", "", "lora/../..", "lora/", "nothing", "/etc", "lora\\..", "a\0b", "~"]
)
def test_no_name_leads_out_of_a_bundle_and_the_hub_is_not_asked(part: str) -> None:
    code, words = refusal(source.in_bundle, f"scenes-128/{part}")
    assert code == "not-found"
    assert words.startswith("part of scenes-128 must be one that it has: controlnet, dit, image_text, ip_adapter, lora")
    assert refusal(source.locate, f"scenes-128/{part}")[0] == "not-found"


def test_what_lies_in_this_folder_comes_first(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "scenes-128").mkdir()
    shutil.copytree(bundle / "lora", tmp_path / "scenes-128" / "lora")
    assert source.locate("scenes-128/lora") == Path("scenes-128/lora")
    assert source.bundled("scenes-128/lora") == Path("scenes-128/lora")
    assert source.bundled("scenes-128/dit") == bundle / "dit"
    assert source.bundled("else/lora") == Path("else/lora")


def test_only_the_folder_around_can_be_shared(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    index = copy / "dit" / "model_index.json"
    raw = json.loads(index.read_text("utf-8"))
    for named in ("../..", str(bundle), "", True):
        index.write_text(json.dumps({**raw, SHARED: named}), encoding="utf-8")
        assert refusal(pellucid.load, copy / "dit")[0] == "shared-parts"
    index.write_text(json.dumps(raw), encoding="utf-8")
    pellucid.load(copy / "dit")
    alone = Path(shutil.copytree(copy / "dit", tmp_path / "alone" / "dit"))
    assert refusal(pellucid.load, alone)[0] == "shared-parts"


def test_the_image_encoder_of_an_ip_adapter_is_its_own_or_that_of_the_bundle_around_it(
    bundle: Path, tmp_path: Path
) -> None:
    assert adapter_encoder("scenes-128/ip_adapter") == bundle / "image_text"
    copy = Path(shutil.copytree(bundle, tmp_path / "copy"))
    note = copy / "ip_adapter" / ENCODER_NOTE
    for named in ("../..", "..", "../lora", "../../image_text", str(bundle / "image_text"), "", True):
        note.write_text(json.dumps({SHARED: named}), encoding="utf-8")
        assert refusal(adapter_encoder, copy / "ip_adapter")[0] == "shared-parts"
    save_component(source.load_image_encoder(copy / "image_text"), copy / "ip_adapter" / "image_encoder")
    assert adapter_encoder(copy / "ip_adapter") == copy / "ip_adapter" / "image_encoder"
    alone = Path(shutil.copytree(bundle / "ip_adapter", tmp_path / "alone" / "ip_adapter"))
    assert refusal(adapter_encoder, alone)[0] == "shared-parts"
    (alone / ENCODER_NOTE).unlink()
    assert adapter_encoder(alone) is None
    assert adapter_encoder(alone / "ip_adapter.safetensors") is None


# --- use ----------------------------------------------------------------------------------------------------------


def test_float16_files_work_in_float32_on_a_cpu_and_others_as_they_are(bundle: Path, tmp_path: Path) -> None:
    pellucid.load("scenes-128", device="cpu").save(tmp_path / "bf16", dtype=torch.bfloat16)
    cases = {"scenes-128": torch.float32, "scenes-128/dit": torch.float32, tmp_path / "bf16": torch.bfloat16}
    for where, dtype in (cases | {bundle: torch.float32}).items():
        parts = pellucid.load(where, device="cpu").components
        assert {next(one.parameters()).dtype for one in (parts.network, parts.vae, *parts.text_encoders)} == {dtype}
    assert parts.name == str(bundle)
    for asked in ("float16", "stored"):
        parts = pellucid.load("scenes-128", device="cpu", dtype=asked).components
        assert next(parts.network.parameters()).dtype == torch.float16
        assert parts.name == "scenes-128"


def test_plans_by_name_are_those_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = shutil.copytree(tiny_bundle.bundles(), tmp_path / "bundles")
    monkeypatch.setattr(source, "BUNDLES", bundles)
    pipe = pellucid.load("scenes-128", device="cpu")
    schedule, target = pipe.components.schedule, pipe.components.target
    plan = pellucid.compile_plan("dpmpp_2m", schedule=schedule, target=target, grid="trailing", steps=3)
    (bundles / "scenes-128" / "plans").mkdir()
    (bundles / "scenes-128" / "plans" / "3.json").write_text(plan.to_json(), encoding="utf-8")
    name = "scenes-128/plans/3.json"
    assert plan == read_plan(name) == SamplerSetup.parse(name).plan(3, schedule, target)
    assert "3 model calls" in CliRunner().invoke(app, ["plan", name]).output
    made = [pipe(PROMPT, seed=1, plan=one).images[0].tobytes() for one in (name, plan)]
    assert made[0] == made[1]
    assert refusal(read_plan, "scenes-128/plans/9.json")[0] == "not-found"
    assert refusal(read_plan, "nowhere/3.json")[0] == "plan-file"


def test_adapters_by_name_are_those_of_their_folders(bundle: Path, tmp_path: Path) -> None:
    """Each changes the image, and the same one by its path makes the same image."""
    pipe = pellucid.load("scenes-128", image_encoder="scenes-128/image_text", device="cpu")
    outline = Image.open(edges(tmp_path / "edges.png"))
    plain = np.asarray(pipe(PROMPT, **MADE).images[0])
    for field, make in (
        ("loras", Lora),
        ("controls", lambda where: Control(where, outline)),
        ("image_prompts", lambda where: ImagePrompt(where, outline)),
    ):
        part = {"loras": "lora", "controls": "controlnet", "image_prompts": "ip_adapter"}[field]
        named, placed = (pipe(PROMPT, **MADE, **{field: [make(at)]}) for at in (f"scenes-128/{part}", bundle / part))
        assert np.array_equal(np.asarray(named.images[0]), np.asarray(placed.images[0]))
        assert not np.array_equal(np.asarray(named.images[0]), plain)


def sample(*args: str) -> str:
    result = CliRunner().invoke(app, ["sample", *args, "--json"], prog_name="pellucid")
    assert result.exit_code == 0, result.output
    return result.stdout


def test_adapters_by_name_on_the_command_line(bundle: Path, tmp_path: Path) -> None:
    """An IP-Adapter's folder brings its image encoder; a LoRA by name is found again by the recipe in the image."""
    image = edges(tmp_path / "edges.png")
    how = ["scenes-128", PROMPT, "--steps", "2", "--seed", "3", "--device", "cpu"]
    sample(*how, "--out", "plain.png")
    sample(*how, "--lora", "scenes-128/lora:0.5", "--out", "lora.png")
    sample(*how, "--control", f"scenes-128/controlnet,{image}", "--out", "control.png")
    sample(*how, "--image-prompt", f"scenes-128/ip_adapter,{image},0.9", "--out", "prompted.png")
    made = {name: Image.open(f"{name}.png").tobytes() for name in ("plain", "lora", "control", "prompted")}
    assert len(set(made.values())) == 4
    alone = shutil.copytree(bundle / "ip_adapter", tmp_path / "alone")  # with the encoder named, it needs no bundle
    sample(*how, "--image-prompt", f"{alone},{image},0.9", "--image-encoder", "scenes-128/image_text", "--out", "a.png")
    assert Image.open("a.png").tobytes() == made["prompted"]
    again = json.loads(sample("--from", "lora.png", "--device", "cpu", "--out", "again.png"))
    assert "same pixels as lora.png" in again["from"]["pixels"]


def test_the_parts_are_what_other_commands_take() -> None:
    from pellucid.evidence.metrics.image_text import Judge

    assert Judge.load("scenes-128/image_text").text([PROMPT])[0].shape == (1, 24)
    told = CliRunner().invoke(app, ["inspect", "scenes-128/dit", "--json"], prog_name="pellucid")
    assert told.exit_code == 0, told.output
