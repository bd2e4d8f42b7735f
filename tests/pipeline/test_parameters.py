"""The A1111 text: written and read back without loss, and strangers' texts understood as far as we can."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from pellucid import compile_plan, samplers
from pellucid.core import grid as grids
from pellucid.core.errors import PellucidError
from pellucid.pipeline import parameters
from pellucid.pipeline.parameters import Parameters, parse, tidy, understand, write

MODERN = (
    "a lighthouse at dusk, (stormy sea:1.3), <lora:oilPaint:0.8>\n"
    "second line, Steps: many\n"
    "Negative prompt: blurry, low quality\n"
    "more of it\n"
    "Steps: 28, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 1234567890, Size: 512x768, "
    "Model hash: 6ce0161689, Model: v1-5-pruned-emaonly, VAE hash: 735e4c3a44, Clip skip: 2, "
    'ENSD: 31337, RNG: CPU, Lora hashes: "oilPaint: 0123abcd4567", Version: v1.10.1'
)


def said(text: str, **wanted: Any) -> parameters.ForeignRecipe:
    """Understands a text, and holds it to the fields given here."""
    found = understand(text)
    assert {key: found.fields.get(key) for key in wanted} == wanted
    return found


# --- there and back --------------------------------------------------------------------------------------------

KEYS = st.text(st.characters(blacklist_characters=':,"', blacklist_categories=["Cc", "Cs"]), min_size=1, max_size=12)


@given(
    prompt=st.text(max_size=80),
    negative=st.text(max_size=80),
    settings=st.dictionaries(KEYS.filter(lambda key: key == key.strip()), st.text(max_size=30), max_size=5),
    steps=st.integers(1, 999),
)
@example(prompt="Steps: 20, Sampler: Euler", negative="Steps: 3", settings={"Note": 'say "a, b: c"'}, steps=1)
@example(prompt="a\n\nb\r\nc\rd", negative="\u2028 x \x85", settings={"Empty": "", "Raw": '{"a": [1, 2]}'}, steps=1)
@example(prompt="", negative="", settings={"Line": "one\ntwo", "Back": "\\", "Quote": '"'}, steps=20)
def test_any_text_comes_back(prompt: str, negative: str, settings: dict[str, str], steps: int) -> None:
    """Up to blanks at the ends and the kind of line end; a line of the prompt that is the mark itself is ambiguous."""
    assume(not any(line.startswith(parameters.NEGATIVE) for line in tidy(prompt).split("\n")))
    given_one = Parameters(prompt, negative, {"Steps": str(steps), **settings})
    found = parse(write(given_one))
    assert found == Parameters(tidy(prompt), tidy(negative), given_one.settings)
    assert write(found) == write(given_one)


def test_the_form_is_the_one_that_people_know() -> None:
    text = write(
        Parameters("a cat", "a dog", {"Steps": "20", "Sampler": "Euler a", "Lora hashes": "a: b, c: d", "Size": "8x8"})
    )
    assert text == ('a cat\nNegative prompt: a dog\nSteps: 20, Sampler: Euler a, Lora hashes: "a: b, c: d", Size: 8x8')
    assert write(Parameters("a cat", "", {"Steps": "20"})) == "a cat\nSteps: 20"


@given(st.text(max_size=300))
@example('Steps: 1, A: "unclosed, B: {"x": , C: [[[[')
@example("Steps: 1, : , ,, :::")
def test_no_text_is_too_strange_to_read(text: str) -> None:
    for strange in (text, f"Steps: 5, {text}"):
        found = understand(strange)
        assert isinstance(found.fields["prompt"], str)
        json.dumps(found.fields)


def test_deep_and_endless_texts_end_in_a_line() -> None:
    nested = "Steps: 5, Hashes: " + "[" * 100_000
    assert parse(nested).settings["Steps"] == "5"
    with pytest.raises(PellucidError) as caught:
        parse("x" * (parameters.MAX_TEXT + 1))
    assert caught.value.code == "parameters-size"
    with pytest.raises(PellucidError):
        write(Parameters("", "", {"a: b": "c"}))


# --- parsing ---------------------------------------------------------------------------------------------------


def test_a_modern_text_is_taken_apart() -> None:
    found = parse(MODERN)
    assert found.prompt.split("\n")[1] == "second line, Steps: many"
    assert found.negative_prompt == "blurry, low quality\nmore of it"
    assert found.settings["Model"] == "v1-5-pruned-emaonly"
    assert found.settings["Lora hashes"] == "oilPaint: 0123abcd4567"
    assert found.settings["Version"] == "v1.10.1"
    assert found.rest == ()


def test_the_last_line_of_steps_counts_and_what_follows_it_is_kept() -> None:
    found = parse("Steps: 3, Sampler: fake\nNegative prompt: x\nSteps: 9, Seed: 4\nTemplate: a {b|c}")
    assert found.prompt == "Steps: 3, Sampler: fake"
    assert found.settings == {"Steps": "9", "Seed": "4"}
    assert found.rest == ("Template: a {b|c}",)


def test_a_text_without_settings_is_a_prompt() -> None:
    assert parse("just a cat: fluffy, 4k\nsecond line") == Parameters("just a cat: fluffy, 4k\nsecond line")
    assert parse("") == Parameters()
    assert parse("a cat\nSampler: Euler a, Seed: 3").settings == {"Sampler": "Euler a", "Seed": "3"}


def test_pieces_doubles_and_raw_json_lose_nothing() -> None:
    found = parse('Steps: 5, odd piece, Seed: 1, Seed: 2, Hashes: {"model": "ab", "vae": "cd"}, Size: 8x8')
    assert found.settings == {"Steps": "5", "Seed": "1", "Hashes": '{"model": "ab", "vae": "cd"}', "Size": "8x8"}
    assert found.rest == ("odd piece", "Seed: 2")
    civitai = parse('Steps: 5, Civitai resources: [{"type":"lora","weight":0.8}], Civitai metadata: {}')
    assert civitai.settings["Civitai resources"] == '[{"type":"lora","weight":0.8}]'
    assert parse("a\r\nNegative prompt: b\r\nSteps: 5\r\n") == Parameters("a", "b", {"Steps": "5"})


# --- understanding ---------------------------------------------------------------------------------------------


def test_a_modern_text_is_understood() -> None:
    found = said(
        MODERN,
        prompt="a lighthouse at dusk, (stormy sea:1.3),\nsecond line, Steps: many",
        negative_prompt="blurry, low quality\nmore of it",
        steps=28,
        sampler="dpmpp_2m",
        grid={"name": "karras"},
        dialect="k-diffusion",
        guidance={"scale": 6.5},
        seed=1234567890,
        size=(512, 768),
        model="v1-5-pruned-emaonly",
        model_hash="6ce0161689",
        clip_skip=1,
        weighting=True,
        adapters=[{"name": "oilPaint", "kind": "lora", "hash": "0123abcd4567", "scale": 0.8}],
    )
    assert set(found.unread) == {"VAE hash", "ENSD", "RNG", "Version"}
    assert "strength" not in found.fields
    assert any("seed" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "sampler", "grid"),
    [
        ("Euler a", "euler_a", "linspace"),
        ("Euler", "euler", "linspace"),
        ("LMS Karras", "lms", "karras"),
        ("DPM2 a Karras", "dpm2_a", "karras"),
        ("DPM++ 2S a", "dpmpp_2s_a", "linspace"),
        ("DPM++ 2M Karras", "dpmpp_2m", "karras"),
        ("DPM++ SDE Karras", "dpmpp_sde", "karras"),
        ("DPM++ 2M SDE Exponential", "dpmpp_2m_sde", "exponential"),
        ("DPM++ 3M SDE Karras", "dpmpp_3m_sde", "karras"),
        ("Heun", "heun", "linspace"),
        ("DDIM", "ddim", None),
        ("PLMS", "plms", None),
        ("UniPC", "unipc", None),
        ("LCM", "lcm", None),
    ],
)
def test_old_sampler_names_are_ours_and_compile(name: str, sampler: str, grid: str | None) -> None:
    found = said(f"x\nSteps: 12, Sampler: {name}, Seed: 1", sampler=sampler, grid={"name": grid} if grid else None)
    assert found.unread == {}
    plan = compile_plan(sampler, steps=12, grid=grid, dialect=found.fields.get("dialect", "exact"))
    assert (plan.name, plan.grid["steps"]) == (sampler, 12)


@pytest.mark.parametrize(("kind", "grid"), [*parameters.SCHEDULES.items(), ("karras", "karras"), ("lu", "lu")])
def test_schedule_types_are_grids(kind: str, grid: str) -> None:
    found = said(f"x\nSteps: 12, Sampler: Euler, Schedule type: {kind}", sampler="euler", grid={"name": grid})
    assert found.unread == {}
    assert grids.named(grid).name == grid


def test_what_has_no_counterpart_is_reported() -> None:
    found = said("x\nSteps: 12, Sampler: DPM adaptive, Schedule type: Karras", steps=12, sampler=None, grid=None)
    assert found.unread == {"Sampler": "DPM adaptive", "Schedule type": "Karras"}
    assert any("DPM adaptive" in note for note in found.notes)
    found = said("x\nSteps: 12, Sampler: Euler, Schedule type: Turbo", sampler="euler", grid=None)
    assert found.unread == {"Schedule type": "Turbo"}
    found = said("x\nSteps: 12, Sampler: Euler, Schedule type: Automatic", sampler="euler", grid=None)
    assert found.unread == {}
    assert any("Automatic" in note for note in found.notes)
    found = said("[a:b:0.5] AND c\nSteps: 12", prompt="[a:b:0.5] AND c", weighting=True)
    assert any("AND" in note for note in found.notes)


def test_the_ends_of_a_sigma_grid_and_eta_are_read_where_they_mean_something() -> None:
    tail = "Schedule rho: 5, Schedule min sigma: 0.1, Schedule max sigma: 10, Eta: 0.5"
    found = said(
        f"x\nSteps: 12, Sampler: Euler a, Schedule type: Karras, {tail}",
        grid={"name": "karras", "rho": 5.0, "sigma_min": 0.1, "sigma_max": 10.0},
        options={"eta": 0.5},
    )
    assert found.unread == {}
    found = said(f"x\nSteps: 12, Sampler: Heun, Schedule type: Uniform, {tail}", options=None)
    assert set(found.unread) == {"Schedule rho", "Schedule min sigma", "Schedule max sigma", "Eta"}


def test_strength_belongs_to_image_to_image_not_to_the_second_pass() -> None:
    said("x\nSteps: 12, Denoising strength: 0.75", strength=0.75)
    text = "x\nSteps: 12, Denoising strength: 0.7, Hires upscale: 2, Hires upscaler: Latent"
    found = said(text, strength=None)
    assert set(found.unread) == {"Denoising strength", "Hires upscale", "Hires upscaler"}
    assert any("Hires" in note for note in found.notes)


@pytest.mark.parametrize(
    "pair",
    ["Steps: 0", "Steps: 99999", "CFG scale: nan", "CFG scale: inf", "CFG scale: high", "Seed: -1", "Seed: 1.5",
     f"Seed: {2**64}", "Seed: " + "9" * 5000, "Size: 0x8", "Size: big", "Clip skip: 0", "Denoising strength: 2"],
)  # fmt: skip
def test_a_value_out_of_its_range_is_not_taken(pair: str) -> None:
    key, value = pair.split(": ")
    found = understand(f"x\nSteps: 7, Sampler: Euler\nSteps: 5, {pair}" if key != "Steps" else f"x\n{pair}, Seed: 1")
    assert found.unread[key] == value
    assert any(note.startswith(f"{key} must be") for note in found.notes)


def test_several_loras_become_adapters_and_unknown_hashes_stay() -> None:
    text = 'a <lora:one:1> cat <lora:two:-0.5>\nSteps: 5, Lora hashes: "one: aa, three: cc"'
    found = said(
        text,
        prompt="a cat",
        adapters=[
            {"name": "one", "kind": "lora", "hash": "aa", "scale": 1.0},
            {"name": "two", "kind": "lora", "hash": None, "scale": -0.5},
        ],
    )
    assert found.unread == {"Lora hashes": "three: cc"}


# --- our own recipes in their words ----------------------------------------------------------------------------


@given(
    name=st.sampled_from(samplers.names()),
    grid=st.sampled_from([g for g in grids.names() if g != "explicit"]),
    scale=st.floats(0, 30),
    seed=st.integers(0, 2**64 - 1),
    skip=st.integers(0, 4),
    strength=st.none() | st.floats(0, 1),
)
def test_what_we_write_we_understand(
    name: str, grid: str, scale: float, seed: int, skip: int, strength: float | None
) -> None:
    recipe = {
        "prompt": "a cat", "negative_prompt": "a dog", "sampler": name, "grid": {"name": grid}, "steps": 20,
        "guidance": {"scale": scale}, "seed": seed, "size": [512, 768], "model": "C:/models, new",
        "model_hash": "sha256:0123456789abcdef", "clip_skip": skip, "strength": strength, "pellucid": "1.2",
        "adapters": [{"name": "style", "kind": "lora", "hash": "ff", "scale": 0.5}, {"name": "c", "kind": "edges"}],
    }  # fmt: skip
    found = understand(write(parameters.describe(recipe)))
    kept = {key: recipe[key] for key in ("prompt", "negative_prompt", "sampler", "grid", "steps", "guidance", "seed")}
    assert {key: found.fields[key] for key in kept} == kept
    assert found.fields["size"] == (512, 768)
    assert found.fields["model"] == "C:/models, new"
    assert found.fields["model_hash"] == "0123456789"
    assert found.fields.get("clip_skip", 0) == skip
    assert found.fields.get("strength") == strength
    assert found.fields["adapters"] == [{"name": "style", "kind": "lora", "hash": "ff", "scale": 0.5}]
    assert found.unread == {"Version": "pellucid 1.2"}
