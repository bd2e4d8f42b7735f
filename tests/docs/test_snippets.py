"""Every Python snippet of the docs runs; one that begins with "# continued" after the one before it. Those of the
README are in test_readme."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MIGRATION = ROOT / "docs/howto/from_diffusers.md"  # its blocks build on each other


def blocks(page: Path) -> list[str]:
    found: list[str] = []
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M):
        if code.startswith("# continued\n"):
            found[-1] += code
        else:
            found.append(code)
    return found


def snippets() -> list[tuple[str, str]]:
    pages = [page for page in PAGES[1:] if page != MIGRATION]
    return [(f"{page.relative_to(ROOT)}:{i}", code) for page in pages for i, code in enumerate(blocks(page))]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages name: a tiny model, a ControlNet for it, a LoRA, a sketch and a mask."""
    import diffusers
    import tiny_models as tiny
    from PIL import Image
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("pages")
    peer = tiny.stable_diffusion(folder / "parts")
    peer.save_pretrained(folder / "model")
    control = diffusers.ControlNetModel.from_unet(peer.unet, conditioning_embedding_out_channels=(8, 16))
    control.save_pretrained(folder / "control")
    layer = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    wide = peer.unet.get_submodule(layer).in_features
    save_file(
        {f"unet.{layer}.lora_A.weight": torch.ones(2, wide), f"unet.{layer}.lora_B.weight": torch.ones(wide, 2)},
        folder / "style.safetensors",
    )
    Image.linear_gradient("L").resize((32, 32)).convert("RGB").save(folder / "sketch.png")
    Image.linear_gradient("L").resize((32, 32)).save(folder / "mask.png")
    return folder


@pytest.mark.parametrize(("place", "code"), snippets(), ids=lambda value: value if ".md" in value[:60] else "")
def test_snippet_runs(place: str, code: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "pellucid.load(" in code:
        monkeypatch.chdir(request.getfixturevalue("models"))
    exec(compile(code, place, "exec"), {"__name__": "snippet"})


@pytest.mark.filterwarnings("ignore")  # what diffusers and transformers say of themselves
def test_both_sides_of_the_migration_page_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "page"}
    codes = blocks(MIGRATION)
    assert len(codes) >= 20
    for i, code in enumerate(codes):
        exec(compile(code, f"{MIGRATION.name}:{i}", "exec"), space)


def test_there_are_snippets() -> None:
    assert len(snippets()) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_newcomers_map_names_files_that_exist() -> None:
    found = re.findall(r"`((?:[a-z_]+/)+[a-z_]+(?:\.py)?)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(found) > 20
    for path in found:
        assert (ROOT / "src/pellucid" / path).exists() or (ROOT / path).exists(), f"CONTRIBUTING.md names {path}"
