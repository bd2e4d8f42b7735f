"""Hub ids, without a network: a cache in huggingface_hub's layout, and a hub that answers what it is told to."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny_models as tiny
from huggingface_hub import errors
from huggingface_hub.utils import validate_repo_id
from hypothesis import event, given
from hypothesis import strategies as st

from pellucid import Scheduler
from pellucid.core.errors import PellucidError
from pellucid.interop import hub
from pellucid.interop.source import load_component, read_components

client = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])  # the hub's HTTP client
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that is out of reach."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def unreachable(*args: Any, **kwargs: Any) -> Any:
        raise client.ConnectError("Temporary failure in name resolution")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    return tmp_path / "hub"


def stored(cache: Path, repo: str, source: Path, revision: str = "main") -> Path:
    """A repository in the cache: refs/REVISION names a commit, snapshots/COMMIT links to blobs."""
    place = cache / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs" / revision).write_text(COMMIT, encoding="utf-8")
    (place / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        link = place / "snapshots" / COMMIT / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place / "blobs" / str(number))
        link.symlink_to(place / "blobs" / str(number))
    return place / "snapshots" / COMMIT


def refusal(repo: str, code: str, **options: Any) -> str:
    with pytest.raises(PellucidError, match="must") as error:
        read_components(repo, **options)
    assert error.value.code == code
    assert "\n" not in str(error.value)
    return str(error.value)


# What is cached


def test_a_cached_model_needs_no_network(cache: Path) -> None:
    pipe, folder = tiny.saved("ddpm")
    snapshot = stored(cache, "someone/tiny-ddpm", folder)
    assert hub.fetch("someone/tiny-ddpm") == snapshot
    found = read_components("someone/tiny-ddpm")
    assert found.name == "someone/tiny-ddpm"
    assert found.network.state_dict().keys() == pipe.unet.state_dict().keys()


def test_revisions(cache: Path) -> None:
    stored(cache, "someone/tiny-ddpm", tiny.saved("ddpm")[1], revision="v1")
    assert read_components("someone/tiny-ddpm", revision="v1").pipeline_class == "DDPMPipeline"
    assert read_components("someone/tiny-ddpm", revision=COMMIT).pipeline_class == "DDPMPipeline"
    assert "it is not there" in refusal("someone/tiny-ddpm", "hub-network")


def test_one_cached_component(cache: Path) -> None:
    pipe, folder = tiny.saved("controlnet")
    stored(cache, "someone/control", folder / "controlnet")
    assert load_component("someone/control").state_dict().keys() == pipe.controlnet.state_dict().keys()


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("unet", "diffusion_pytorch_model.safetensors"),
        ("vae", "config.json"),
        ("tokenizer", "*"),
        ("scheduler", "scheduler_config.json"),
    ],
)
def test_what_a_partial_copy_lacks_is_named(cache: Path, part: str, file: str) -> None:
    snapshot = stored(cache, "someone/tiny", tiny.saved("sd1")[1])
    assert hub.lacks(snapshot) == []
    for path in (snapshot / part).glob(file):
        path.unlink()
    assert hub.lacks(snapshot) == [part]
    assert f"lacks {part}" in refusal("someone/tiny", "hub-network")


def test_a_variant_that_is_not_cached_is_not_there(cache: Path) -> None:
    snapshot = stored(cache, "someone/tiny", tiny.saved("sd1")[1])
    assert set(hub.lacks(snapshot, "fp16")) == {"unet", "vae", "text_encoder"}


def test_a_missing_shard_is_a_lack(cache: Path, tmp_path: Path) -> None:
    tiny.saved("ddpm")[0].save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    snapshot = stored(cache, "someone/tiny", tmp_path / "sharded")
    assert hub.lacks(snapshot) == []
    next((snapshot / "unet").glob("*-00001-of-*.safetensors")).unlink()
    assert hub.lacks(snapshot) == ["unet"]


# What is fetched


def test_a_download_takes_only_what_is_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.saved("sd1")[1]
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    extra = ["v1-5-pruned.ckpt", "unet/diffusion_pytorch_model.fp16.safetensors", "unet/diffusion_pytorch_model.bin"]
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *args, **kwargs: [*names, *extra])
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, revision=None: str(folder / name))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_components("someone/tiny", revision="main").pipeline_class == "StableDiffusionPipeline"
    assert asked == {"repo": "someone/tiny", "revision": "main", "allow_patterns": sorted(names)}


INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "safety_checker": ["stable_diffusion", "StableDiffusionSafetyChecker"],
}
REPOSITORY = [
    ".gitattributes",
    "README.md",
    "model_index.json",
    "sd.safetensors",
    "unet/config.json",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.safetensors",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "text_encoder/config.json",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.safetensors.index.json",
    "text_encoder/model-00001-of-00002.safetensors",
    "text_encoder/model-00002-of-00002.safetensors",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "scheduler/scheduler_config.json",
    "safety_checker/config.json",
    "safety_checker/model.safetensors",
]
WORDS = {
    "model_index.json",
    "unet/config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors.index.json",
    "tokenizer/vocab.json",
    "tokenizer/merges.txt",
    "scheduler/scheduler_config.json",
}


@pytest.mark.parametrize(
    ("variant", "weights"),
    [
        (
            None,
            {
                "unet/diffusion_pytorch_model.safetensors",
                "text_encoder/model-00001-of-00002.safetensors",
                "text_encoder/model-00002-of-00002.safetensors",
            },
        ),
        ("fp16", {"unet/diffusion_pytorch_model.fp16.safetensors", "text_encoder/model.fp16.safetensors"}),
    ],
)
def test_one_precision_and_one_format(variant: str | None, weights: set[str]) -> None:
    assert set(hub.wanted(REPOSITORY, INDEX, variant)) == WORDS | weights


def test_a_network_at_the_root_and_its_scheduler() -> None:
    names = ["model_index.json", "config.json", "scheduler_config.json", "diffusion_pytorch_model.bin", "sample.png"]
    index = {"_class_name": "DDPMPipeline", "unet": ["diffusers", "UNet2DModel"]}
    assert set(hub.wanted(names, index)) == set(names) - {"sample.png"}
    assert set(hub.wanted([n for n in names if n != "model_index.json"], None)) == {*names[1:4]}


def test_a_t5_is_not_fetched() -> None:
    index = {
        "transformer": ["diffusers", "PixArtTransformer2DModel"],
        "text_encoder": ["transformers", "T5EncoderModel"],
    }
    names = [
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "text_encoder/model.safetensors",
    ]
    assert hub.wanted(names, index) == sorted(names[:2])


# What goes wrong


def answering(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)


RESPONSE = client.Response(404, request=client.Request("GET", "https://hub.example"))


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (errors.RepositoryNotFoundError("404\nnot found", response=RESPONSE), "hub-missing", "No such repository"),
        (errors.GatedRepoError("403", response=RESPONSE), "hub-gated", "Accept its terms"),
        (errors.RevisionNotFoundError("404", response=RESPONSE), "hub-revision", "got 'v9'"),
        (errors.HfHubHTTPError("500\nserver", response=RESPONSE), "hub-network", "500"),
        (errors.OfflineModeIsEnabled("offline"), "hub-network", "offline"),
        (ConnectionError("no route"), "hub-network", "no route"),
        (client.ConnectTimeout("slow"), "hub-network", "slow"),
    ],
)
def test_each_answer_is_one_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: str, words: str
) -> None:
    answering(monkeypatch, error)
    assert words in refusal("someone/none", code, revision="v9")


def test_a_repository_of_another_kind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *a, **k: ["README.md", "sd.safetensors"])
    assert "sd.safetensors" in refusal("someone/file", "not-a-model")


@pytest.mark.parametrize("name", ["a/b", "CompVis/stable-diffusion-v1-4", "x_y/z.0"])
def test_ids(name: str) -> None:
    assert hub.is_id(name)


@pytest.mark.parametrize(
    "name", ["a", "a/b/c", "../b", "/a/b", "a/..", "a--b/c", "a/b.git", "ä/b", "a b/c", "a/b-", ""]
)
def test_what_is_no_id(name: str) -> None:
    assert not hub.is_id(name)
    with pytest.raises(PellucidError, match="hub id must be owner/name"):
        hub.fetch(name)


@given(st.text("aB0-._/é", max_size=8))
def test_the_hub_takes_every_id_that_we_take(name: str) -> None:
    if hub.is_id(name):
        validate_repo_id(name)
    else:
        event("no id")


# One file


def test_a_scheduler_comes_from_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(cache, "someone/tiny-ddpm", tiny.saved("ddpm")[1])
    found = Scheduler.from_pretrained("someone/tiny-ddpm", subfolder="scheduler")
    assert found.config["_class_name"] == "DDPMScheduler"
    with pytest.raises(PellucidError, match=r"the copy there lacks other/scheduler_config\.json") as error:
        Scheduler.from_pretrained("someone/tiny-ddpm", subfolder="other")
    assert "\n" not in str(error.value)
    file = tiny.saved("ddpm")[1] / "scheduler/scheduler_config.json"
    asked: list[tuple[str, str]] = []

    def answer(repo: str, name: str, *, revision: str | None) -> str:
        asked.append((repo, name))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", answer)
    assert Scheduler.from_pretrained("another/model", subfolder="scheduler").config == found.config
    assert asked == [("another/model", "scheduler/scheduler_config.json")]
