"""The text-conditioned task: what it asks, that it learns, and that pipelines read what it saves as it was trained."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from scene_cases import CPU, asked, batch, built, loss, text_table, tokenizer, train, write_parts
from tiny_networks import ENCODER, PIXART, UNET

from pellucid.core.errors import PellucidError
from pellucid.models.vae import to_diffusion
from pellucid.pipeline.encoders.text import encode_pair, encode_prompts
from pellucid.pipeline.load import load
from pellucid.train.draws import Draws, mixed
from pellucid.train.text import tokens
from pellucid.train.text_denoiser import TextAndDenoiser, TextDenoiserConfig, TextDenoiserTask

WORDS = ("a red star", "a striped blue square on a white background")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parts(tmp_path_factory.mktemp("parts"))


def task_of(parts: Path, **changes: Any) -> TextDenoiserTask:
    task: TextDenoiserTask = built(TextDenoiserConfig, text_table(parts, **changes))
    return task


class Run:
    """A UNet with its text encoder after forty steps, before and after, with the folder that was saved."""

    def __init__(self, parts: Path, folder: Path) -> None:
        self.task = task_of(parts)
        self.before = loss(self.task)
        train(self.task, folder, steps=40)
        self.task.network.eval()
        self.after = loss(self.task)
        self.folder = folder / "model"
        self.pipe = load(self.folder, device="cpu")


@pytest.fixture(scope="module")
def run(parts: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(parts, tmp_path_factory.mktemp("run") / "out")


# What is asked


def test_images_are_encoded_and_latents_taken_as_they_are(parts: Path) -> None:
    task, given = task_of(parts), batch(4)
    draws = Draws(1, 2, 4)
    found = task.prepare(given, draws)
    with torch.no_grad():
        posterior = task.vae.encode(given.images)
        want = to_diffusion(task.vae.config, posterior.sample(draws.normal("posterior", (4, 8, 8))))
    assert torch.equal(found["x0"], want)
    assert torch.equal(task.prepare(replace(given, images=want), draws)["x0"], want)


def test_dropped_captions_are_the_empty_prompt(parts: Path) -> None:
    task, given, draws = task_of(parts), batch(16), Draws(1, 2, 16)
    dropped = draws.uniform("dropout") < 0.25
    ids = task.prepare(given, draws)["ids"]
    assert 0 < dropped.sum() < 16
    for row, drop in enumerate(dropped.tolist()):
        want = "" if drop else given.captions[row]
        assert ids[row].tolist() == tokenizer().encode(want)


def test_parts_of_a_batch_are_asked_what_the_whole_is(parts: Path) -> None:
    task, given = task_of(parts), batch(8)
    whole = task.prepare(given, Draws(3, 5, 8))
    for part in range(2):
        rows = slice(4 * part, 4 * part + 4)
        mine = replace(given, images=given.images[rows], captions=given.captions[rows])
        found = task.prepare(mine, Draws(3, 5, 8, part, 2))
        for name, tensor in found.items():
            want = whole[name][:, rows] if name == "numbers" else whole[name][rows]
            assert torch.allclose(tensor, want, atol=1e-6), name  # convolutions of another batch size round otherwise


def test_a_caption_longer_than_the_window_is_cut() -> None:
    short, long = tokens(tokenizer(), ["a red star", "a red star " * 30]).tolist()
    own = tokenizer()
    assert len(short) == len(long) == own.length
    assert long[-1] == own.eos
    assert long[1:-1] == own.ids("a red star " * 30)[: own.room]


# Training


def test_it_learns_and_the_text_encoder_with_it(run: Run, parts: Path) -> None:
    assert run.after < 0.9 * run.before
    fresh = task_of(parts).network
    assert isinstance(fresh, TextAndDenoiser)
    assert isinstance(run.task.network, TextAndDenoiser)
    moved = [
        name
        for (name, new), old in zip(run.task.network.named_parameters(), fresh.parameters(), strict=True)
        if not torch.equal(new, old)
    ]
    assert any(name.startswith("text_encoder.text_model.encoder") for name in moved)
    assert any(name.startswith("denoiser.") for name in moved)


def test_the_same_seed_gives_the_same_weights(run: Run, parts: Path, tmp_path: Path) -> None:
    one, two = (train(task_of(parts), tmp_path / name, steps=2).network.state_dict() for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


# What is saved


def test_a_pipeline_tells_the_network_what_training_told_it(run: Run) -> None:
    """Tokens, layer, padding, mask: the context of a caption is the same, and so is the network's answer."""
    components = run.pipe.components
    context = encode_prompts(components.text_encoders, components.tokenizers, list(WORDS))
    ids = run.task.conditions(WORDS)["ids"]
    assert context.mask is None
    x, time = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([900.0, 30.0])
    with torch.no_grad():
        trained = run.task.network(x, time, ids=ids)
        assert torch.equal(run.task.network.text_encoder(ids).last, context.context)
        assert torch.equal(components.network(x, time, context=context.context), trained)
    _, empty = encode_pair(components.text_encoders, components.tokenizers, ["a red star"])
    assert torch.equal(run.task.network.text_encoder(run.task.conditions([""])["ids"]).last, empty.context)


def test_the_pipeline_makes_the_task_s_own_images(run: Run) -> None:
    """The whole way: text, guidance, plan, schedule, target, scaling of latents, decoder."""
    want = run.task.images(run.task.network, 2, seed=5)
    assert want.shape == (2, 3, 16, 16)
    assert 0 <= want.min() < want.max() <= 1
    assert torch.equal(want, run.task.images(run.task.network, 2, seed=5))
    assert not torch.equal(want, run.task.images(run.task.network, 2, seed=6))
    streams = [torch.Generator().manual_seed(mixed(5, i)) for i in range(2)]
    first = torch.stack([torch.randn(4, 8, 8, generator=stream) for stream in streams])
    made = run.pipe(
        ["a red star", "a large blue circle"],
        guidance=3.0,
        steps=4,
        latents=first,
        dialect="exact",
        sampler="dpmpp_2m",
        grid="trailing",
    )
    got = torch.stack([torch.tensor(np.asarray(image)).permute(2, 0, 1) / 255 for image in made.images])
    assert (got - want).abs().max() <= 0.5001 / 255  # an image is rounded to 8 bits


def test_the_saved_scheduler_is_the_trained_schedule_and_target(run: Run) -> None:
    saved = json.loads((run.folder / "scheduler" / "scheduler_config.json").read_text("utf-8"))
    assert saved["_class_name"] == "DPMSolverMultistepScheduler"
    assert (saved["prediction_type"], saved["timestep_spacing"]) == ("v_prediction", "trailing")
    assert run.pipe.components.target == "v"
    assert run.pipe.components.schedule == run.task.objective.schedule
    assert run.pipe.components.notes == ()


def test_diffusers_makes_the_same_image_of_the_folder(run: Run) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer's own
        diffusers.utils.logging.set_verbosity_error()
        peer = diffusers.StableDiffusionPipeline.from_pretrained(str(run.folder), safety_checker=None)
        peer.set_progress_bar_config(disable=True)
        options = {"num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "np"}
        theirs = peer(WORDS[0], generator=torch.Generator().manual_seed(3), **options).images[0]
    ours = np.asarray(run.pipe(WORDS[0], seed=3, steps=4, guidance=3.0).images[0]) / 255
    assert abs(ours - theirs).max() <= 0.51 / 255 + 1e-4


@pytest.mark.parametrize(
    ("objective", "sampling"),
    [
        ({"schedule": {"name": "flow"}, "target": "flow"}, {"sampler": "dpmpp_2m", "grid": "trailing", "steps": 3}),
        ({"schedule": {"name": "flow"}, "target": "flow"}, {"sampler": "flow_euler", "grid": "linspace", "steps": 3}),
        ({"schedule": {"name": "linear"}, "target": "eps"}, {"sampler": "dpmpp_2m", "grid": "karras", "steps": 3}),
        (
            {"schedule": {"name": "scaled_linear", "zero_snr": True}, "target": "v"},
            {"sampler": "ddim", "grid": "trailing", "steps": 3},
        ),
    ],
)
def test_other_schedules_and_targets_come_back_from_the_folder(
    parts: Path, tmp_path: Path, objective: dict[str, Any], sampling: dict[str, Any]
) -> None:
    task = task_of(parts, objective=objective, sampling=sampling)
    task.save(task.network, tmp_path / "model")
    found = load(tmp_path / "model", device="cpu").components
    assert found.target == objective["target"]
    times = np.linspace(*found.schedule.span, 7)
    assert np.allclose(found.schedule.ratio_at(times), task.objective.schedule.ratio_at(times), rtol=1e-12)
    assert task.images(task.network, 1, 0).isfinite().all()


# A frozen encoder


def test_a_pixart_reads_the_trained_encoder_frozen(run: Run, parts: Path, tmp_path: Path) -> None:
    task = task_of(
        parts,
        network=PIXART,
        text={"folder": str(run.folder)},
        objective={"schedule": {"name": "linear"}, "target": "eps", "dropout": 0.1},
    )
    held = {name: tensor.clone() for name, tensor in task.text.encoder.state_dict().items()}
    before = loss(task)
    train(task, tmp_path / "out", steps=30)
    assert loss(task) < 0.9 * before
    assert all(torch.equal(tensor, held[name]) for name, tensor in task.text.encoder.state_dict().items())
    assert "context" in asked(task)
    assert not any("text" in name for name, _ in task.network.named_parameters())
    pipe = load(tmp_path / "out" / "model", device="cpu")
    assert pipe.components.pipeline_class == "PixArtAlphaPipeline"
    assert pipe.components.target == "eps"
    context = encode_prompts(pipe.components.text_encoders, pipe.components.tokenizers, list(WORDS))
    assert context.mask is None  # a pipeline masks no token of CLIP's, so training does not either
    assert torch.equal(task.conditions(WORDS)["context"], context.context)
    x, time = torch.randn(2, 4, 8, 8), torch.tensor([900.0, 30.0])
    with torch.no_grad():
        want = task.network(x, time, context=context.context)
        assert torch.equal(pipe.components.network(x, time, context=context.context), want)
    assert pipe("a red star", steps=2, guidance=2.0).images[0].size == (16, 16)


# Training further


def test_a_saved_network_is_trained_further_with_its_encoder(run: Run, parts: Path) -> None:
    further = task_of(parts, network={}, start=str(run.folder), text={"folder": str(run.folder), "train": True})
    assert loss(further) == pytest.approx(run.after, rel=1e-5)
    assert all(p.requires_grad for p in further.network.parameters())
    assert len(list(further.network.parameters())) == len(list(run.task.network.parameters()))


# Refusals

FROZEN = {"encoder": ENCODER, "tokenizer": "TOKENIZER", "train": False}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"network": {**UNET, "cross_attention_dim": 16}}, "components-fit"),
        ({"network": {**PIXART, "caption_channels": 64}}, "components-fit"),
        ({"network": {**UNET, "in_channels": 9}}, "components-fit"),
        ({"network": {**UNET, "num_class_embeds": 3}}, "condition"),
        ({"network": {"_class_name": "DiTTransformer2DModel", "num_layers": 1}}, "class"),
        ({"network": {"_class_name": "Nothing"}}, "class"),
        ({"network": {k: v for k, v in UNET.items() if k != "sample_size"}}, "config-missing"),
        ({"vae": "no/such/folder/at/all"}, "not-found"),
        ({"vae": "TOKENIZER"}, "not-a-component"),
        ({"text": {}}, "config-value"),
        ({"text": {"folder": "x", "encoder": ENCODER}}, "config-value"),
        ({"text": FROZEN}, "config-value"),
        ({"text": {**FROZEN, "train": True, "tokenizer": "nowhere"}}, "tokenizer-files"),
        ({"text": {**FROZEN, "train": True, "encoder": {**ENCODER, "vocab_size": 600}}}, "token-id"),
        ({"text": {**FROZEN, "train": True, "encoder": {**ENCODER, "hidden_sise": 3}}}, "config-key"),
        ({"prompts": []}, "config-value"),
        ({"start": "runs/model"}, "config-value"),
        ({"network": {}}, "config-value"),
        ({"network": {}, "start": "TOKENIZER"}, "not-a-component"),
        ({"sampling": {"sampler": "dpmpp_2m", "grid": "ays"}}, None),
        ({"sampling": {"sampler": "restart"}}, None),
        ({"objective": {"schedule": {"name": "cosine"}, "target": "flow"}}, "target-schedule"),
        ({"dropout": 0.1}, "config-key"),
    ],
)
def test_bad_configs_are_one_line(parts: Path, changes: dict[str, Any], code: str | None) -> None:
    told = json.loads(json.dumps(changes).replace("TOKENIZER", str(parts / "tokenizer")))
    with pytest.raises(PellucidError) as caught:
        task_of(parts, **told)
    assert code is None or caught.value.code == code, caught.value
    assert "\n" not in str(caught.value)


def test_data_that_does_not_fit_is_named(parts: Path) -> None:
    task, given = task_of(parts), batch(4)
    with pytest.raises(PellucidError, match="caption"):
        task.prepare(replace(given, captions=None), Draws(0, 0, 4))
    with pytest.raises(PellucidError, match=r"\(3, 16, 16\), or latents of \(4, 8, 8\)"):
        task.prepare(replace(given, images=torch.zeros(4, 3, 8, 8)), Draws(0, 0, 4))
    assert task.device == CPU
