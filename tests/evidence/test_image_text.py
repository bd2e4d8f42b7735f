"""Image-text: the cosines of transformers' CLIP, prompts that go with their images, files that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers
from PIL import Image
from stand_ins import PROMPTS

from pellucid import PellucidError
from pellucid.evidence.metrics.image_text import Judge, image_text, read_prompts
from pellucid.evidence.metrics.images import Folder, Pixels, open_images
from pellucid.pipeline.encoders.image_inputs import DEVIATION, MEAN


def pixels(count: int, height: int = 40, width: int = 50) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def theirs(folder: Path, arrays: np.ndarray, mean: tuple[float, ...] = MEAN, std: tuple[float, ...] = DEVIATION):
    """100 × cosines by transformers' model and tokenizer; pixels by Pillow: shorter side to 32, the middle."""
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    tokens = transformers.CLIPTokenizer.from_pretrained(folder)(
        PROMPTS, padding="max_length", max_length=16, truncation=True, return_tensors="pt"
    )
    cropped = [Image.fromarray(a).resize((40, 32), Image.Resampling.BICUBIC).crop((4, 0, 36, 32)) for a in arrays]
    floats = torch.from_numpy(np.stack([np.asarray(c) for c in cropped])).float() / 255
    values = ((floats - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2)
    with torch.no_grad():
        out = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], pixel_values=values)
    return (100 * out.image_embeds * out.text_embeds).sum(-1)


def test_the_cosines_are_transformers(clip_folder: Path) -> None:
    arrays = pixels(4)
    found = image_text(
        Pixels(torch.from_numpy(arrays).permute(0, 3, 1, 2)), PROMPTS, Judge.load(clip_folder), resamples=200
    )
    expected = theirs(clip_folder, arrays)
    assert torch.allclose(100 * found.cosines, expected, atol=1e-3)
    assert found.estimate.value == pytest.approx(float(expected.mean()), abs=1e-3)
    low, high = found.estimate.ends or (0.0, 0.0)
    assert low <= found.estimate.value <= high
    assert low < high
    assert (found.cut, found.skipped) == (0, 0)


def test_another_scale_of_pixels_is_taken_from_the_file(clip_folder: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(clip_folder, tmp_path / "clip")
    raw = json.loads((copy / "preprocessor_config.json").read_text())
    raw |= {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    (copy / "preprocessor_config.json").write_text(json.dumps(raw))
    arrays = pixels(4)
    found = image_text(Pixels(torch.from_numpy(arrays).permute(0, 3, 1, 2)), PROMPTS, Judge.load(copy), resamples=0)
    expected = theirs(clip_folder, arrays, (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))
    assert torch.allclose(100 * found.cosines, expected, atol=1e-3)
    assert found.estimate.ends is None
    for change in ({"resample": 2}, {"size": {"shortest_edge": 64}}, {"image_std": [0, 1, 1]}, {"image_mean": "x"}):
        (copy / "preprocessor_config.json").write_text(json.dumps(raw | change))
        with pytest.raises(PellucidError) as error:
            Judge.load(copy)
        assert error.value.code == "clip-pixels"


def test_a_skipped_image_takes_its_prompt_with_it(clip_folder: Path, tmp_path: Path) -> None:
    arrays, judge = pixels(4), Judge.load(clip_folder)
    whole = image_text(Pixels(torch.from_numpy(arrays).permute(0, 3, 1, 2)), PROMPTS, judge, resamples=0)
    for number, array in enumerate(arrays):
        Image.fromarray(array).save(tmp_path / f"{number}.png")
    (tmp_path / "1.png").write_text("no image")
    told: list[int] = []
    found = image_text(open_images(tmp_path), PROMPTS, judge, resamples=0, progress=told.append)
    assert torch.allclose(found.cosines, whole.cosines[[0, 2, 3]], atol=1e-6)
    assert found.skipped == 1
    assert sum(told) == 3


def test_long_prompts_are_cut_and_counted(clip_folder: Path) -> None:
    judge = Judge.load(clip_folder)
    (whole, cut), (part, none) = judge.text(["a b " * 40]), judge.text(["a b " * 7])
    assert (cut, none) == (1, 0)
    assert torch.allclose(whole, part, atol=1e-6)  # 14 words of one letter fit between the two marks


def test_prompts_by_line_and_by_name(tmp_path: Path) -> None:
    images = Folder(tmp_path, ("a.png", "b/c.png"))
    (tmp_path / "p.txt").write_text("first\nsecond\n\n", encoding="utf-8")
    assert read_prompts(tmp_path / "p.txt", images) == ("first", "second")
    rows = [{"file_name": "b/c.png", "text": "second"}, {"file_name": "a.png", "text": "first", "more": 1}]
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl", images) == ("first", "second")


def test_prompts_that_do_not_fit_are_one_line(tmp_path: Path, clip_folder: Path) -> None:
    named, unnamed = Folder(tmp_path, ("a.png", "b.png")), Pixels(torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
    row = json.dumps({"file_name": "a.png", "text": "x"})
    for name, text, images, code in (
        ("1.txt", b"one\n", named, "prompts-count"),
        ("2.txt", b"\xff\xfe\n", named, "prompts"),
        ("3.jsonl", row.encode(), named, "prompts-count"),
        ("4.jsonl", b"[1]\n", named, "prompts"),
        ("5.jsonl", b'{"file_name": "a.png", "text": 3}\n', named, "prompts"),
        ("6.jsonl", row.encode(), unnamed, "prompts"),
    ):
        (tmp_path / name).write_bytes(text)
        with pytest.raises(PellucidError) as error:
            read_prompts(tmp_path / name, images)
        assert (name, error.value.code) == (name, code)
    with pytest.raises(PellucidError) as error:
        read_prompts(tmp_path / "none.txt", named)
    assert error.value.code == "file"
    with pytest.raises(PellucidError) as error:
        image_text(unnamed, ["one"], Judge.load(clip_folder))
    assert error.value.code == "prompts-count"


def test_folders_that_are_no_clip_are_one_line(tmp_path: Path, clip_folder: Path) -> None:
    import shutil

    bare = shutil.copytree(clip_folder, tmp_path / "bare" / "clip")
    for name in ("vocab.json", "merges.txt", "tokenizer.json"):
        (bare / name).unlink(missing_ok=True)
    with pytest.raises(PellucidError) as error:
        Judge.load(bare)
    assert error.value.code == "tokenizer-missing"
    shutil.copytree(clip_folder, tmp_path / "bare" / "tokenizer")  # beside it is as good
    assert Judge.load(bare).tokenizer.length == 16
    alone = tmp_path / "alone"
    tiny.randomised(transformers.CLIPTextModel(tiny.text_config())).save_pretrained(alone)
    with pytest.raises(PellucidError) as error:
        Judge.load(alone)
    assert error.value.code == "clip-folder"
