"""The image-text task: CLIP's loss, over all ranks; that it learns to find captions; and folders that others open."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import crew
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from image_text_worker import BATCH, one_step, table, task_of
from PIL import Image
from safetensors.torch import load_file
from scene_cases import asked, batch, built, loss, tokenizer, train
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

from pellucid.core.errors import PellucidError
from pellucid.evidence.metrics.image_text import Judge
from pellucid.pipeline.encoders.image_inputs import clip_pixels
from pellucid.train.draws import Draws
from pellucid.train.image_text import ImageTextConfig, ImageTextTask, TrainableCLIP, clip_scaled, contrastive
from pellucid.train.source import Batch


@pytest.fixture(autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    tokenizer().save(folder)
    return folder


def retrieval(task: ImageTextTask) -> float:
    """The share of images that find their own caption among eight."""
    question = asked(task, 64)
    with torch.no_grad():
        images, texts, _ = task.network.eval()(question["ids"], question["pixels"])
    cosines = images.view(8, 8, -1) @ texts.view(8, 8, -1).mT  # (groups, images, texts)
    return float(cosines.argmax(2).eq(torch.arange(8)).float().mean())


class Run:
    def __init__(self, words: Path, folder: Path) -> None:
        self.task = task_of(words)
        self.before, self.found_before = loss(self.task), retrieval(self.task)
        train(self.task, folder, steps=120, count=32, rate=1.5e-3)
        self.after, self.found = loss(self.task), retrieval(self.task)
        self.folder = folder / "model"


@pytest.fixture(scope="module")
def run(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(words, tmp_path_factory.mktemp("clip") / "out")


# The loss


def test_the_loss_is_that_of_transformers(run: Run) -> None:
    theirs = CLIPModel.from_pretrained(str(run.folder)).eval()
    question = asked(run.task, 8)
    with torch.no_grad():
        want = theirs(question["ids"], question["pixels"], return_loss=True)
        graded = run.task.loss(run.task.network.eval(), question)
    assert torch.allclose(graded.loss, want.loss, rtol=1e-4)
    assert torch.allclose(graded.errors.mean(), graded.loss)
    assert graded.errors.shape == (8,)


def test_a_pair_that_fits_costs_nothing_and_one_that_does_not_much() -> None:
    directions = torch.eye(4)
    scale = torch.tensor(100.0)
    assert contrastive(directions, directions, scale).max() < 1e-6
    assert torch.allclose(contrastive(directions, directions.roll(1, 0), scale), torch.full((4,), 100.0), rtol=1e-4)
    assert torch.allclose(contrastive(directions, directions, scale * 0), torch.full((4,), math.log(4)))


def test_logits_are_not_rounded_to_the_precision_of_the_networks() -> None:
    """A logit of 70 in bfloat16 is right to 0.25."""
    dice = torch.Generator().manual_seed(0)
    middle = torch.randn(16, generator=dice)
    images, texts = (F.normalize(middle + 0.3 * torch.randn(8, 16, generator=dice), dim=-1) for _ in range(2))
    plain = contrastive(images, texts, torch.tensor(100.0))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(contrastive(images, texts, torch.tensor(100.0)), plain)


def test_the_scale_has_a_ceiling(words: Path, tmp_path: Path) -> None:
    task = task_of(words, most_scale=20.0)
    assert isinstance(task.network, TrainableCLIP)
    start = task.network(**asked(task, 2))[2]
    assert torch.allclose(start, torch.tensor(1 / 0.07), rtol=1e-5)
    with torch.no_grad():
        task.network.clip.logit_scale.fill_(9.0)
    assert torch.allclose(task.network(**asked(task, 2))[2], torch.tensor(20.0))
    task.save(task.network, tmp_path / "clip")
    assert math.isclose(Judge.load(tmp_path / "clip").network.logit_scale.exp().item(), 20.0, rel_tol=1e-5)


def test_two_ranks_have_the_loss_and_gradients_of_the_whole_batch(words: Path, tmp_path: Path) -> None:
    for world in (1, 2):
        out = tmp_path / f"{world}"
        codes = crew.run(world, one_step, str(words), str(out), says=tmp_path / f"says{world}")
        assert codes == [0] * world, crew.said(tmp_path / f"says{world}")
    (whole,), halves = ([load_file(f"{tmp_path / str(world)}.{rank}") for rank in range(world)] for world in (1, 2))
    errors = torch.cat([half.pop("errors") for half in halves])
    assert torch.allclose(errors, whole.pop("errors"), atol=1e-5)
    assert errors.shape == (BATCH,)
    for half in halves:
        assert set(half) == set(whole)
        for name, want in whole.items():
            assert torch.allclose(half[name], want, atol=1e-5, rtol=1e-4), name


# A run


def test_it_learns_to_find_captions(run: Run) -> None:
    assert run.after < 0.8 * run.before
    assert run.found_before < 0.25
    assert run.found > 0.4


def test_the_folder_is_one_that_the_metrics_load(run: Run) -> None:
    judge = Judge.load(run.folder)
    given = batch(6, first=900)
    bytes_ = ((given.images + 1) * 127.5).round().to(torch.uint8)
    question = run.task.prepare(Batch(bytes_ / 127.5 - 1, captions=given.captions), Draws(0, 0, 6))
    with torch.no_grad():
        images, texts, _ = run.task.network.eval()(question["ids"], question["pixels"])
    found, cut = judge.text(given.captions)
    assert cut == 0
    assert torch.allclose(found, texts, atol=1e-5)
    assert torch.allclose(judge.image(bytes_), images, atol=1e-4)


def test_the_folder_is_one_that_transformers_loads(run: Run) -> None:
    given = batch(3, first=900)
    ids = AutoTokenizer.from_pretrained(str(run.folder))(list(given.captions), padding="max_length").input_ids
    assert ids == asked_ids(run.task, given)
    images = [
        Image.fromarray(np.asarray(((one + 1) * 127.5).round().permute(1, 2, 0), "uint8")) for one in given.images
    ]
    theirs = CLIPImageProcessor.from_pretrained(str(run.folder))(images, return_tensors="pt").pixel_values
    assert torch.allclose(theirs, clip_pixels(images, 16), atol=1e-5)
    assert torch.allclose(theirs, clip_scaled(given.images), atol=0.5 / 255 / 0.26)  # images have 8 bits


def asked_ids(task: ImageTextTask, given: Batch) -> Any:
    return task.prepare(given, Draws(0, 0, len(given.images)))["ids"].tolist()


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"tokenizer": "nowhere"}, "tokenizer-files"),
        ({"width": 0}, "config-value"),
        ({"temperature": 0.001}, "config-value"),
        ({"text": {"hidden_size": 30, "num_attention_heads": 4}}, "config-unsupported"),
        ({"text": {"vocab_size": 600, "hidden_size": 32, "num_attention_heads": 2}}, "token-id"),
        ({"text": {"max_position_embeddings": 8, "hidden_size": 32, "num_attention_heads": 2}}, "components-fit"),
        ({"vision": {"layers": 3}}, "config-key"),
        ({"loss": "siglip"}, "config-key"),
    ],
)
def test_bad_configs_are_one_line(words: Path, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(PellucidError) as caught:
        built(ImageTextConfig, table(words, **changes))
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_data_that_does_not_fit_is_named(words: Path) -> None:
    task = task_of(words)
    with pytest.raises(PellucidError, match="caption"):
        task.prepare(Batch(torch.zeros(2, 3, 16, 16)), Draws(0, 0, 2))
    with pytest.raises(PellucidError, match=r"\(3, 16, 16\)"):
        task.prepare(Batch(torch.zeros(2, 3, 8, 8), captions=("a", "b")), Draws(0, 0, 2))
    assert task.images(task.network, 4, 0) is None
