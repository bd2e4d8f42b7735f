"""Draws the images of docs/scenes.md.

.venv/bin/python docs/scenes_images.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from PIL import Image, ImageDraw

from pellucid import scenes as world
from pellucid.pipeline.sheet import face_for
from pellucid.scenes import export

IMAGES = Path(__file__).parent / "images"
SIDE, GAP, FOOT = 118, 8, 20
SEED, ROW = 2, 30  # of the scene that is shown in every style


def maps() -> Image.Image:
    """One scene in every style, and its maps."""
    tiles = {}
    for style in world.STYLE_NAMES:
        scene = world.sample(torch.tensor([ROW]), SEED, styles=(style,), objects=(3,))
        tiles[style] = ((world.render(scene, SIDE)[0] + 1) * 127.5).round().byte().permute(1, 2, 0)
    tiles["edges"] = (255 - world.edges(scene, SIDE)[0, 0] * 255).round().byte()[..., None].expand(-1, -1, 3)
    tones = torch.tensor([[236, 239, 243], [96, 108, 122], [150, 162, 176], [45, 55, 66]], dtype=torch.uint8)
    tiles["segmentation"] = tones[world.segmentation(scene, SIDE)[0]]
    drawn = Image.new("RGB", (len(tiles) * (SIDE + GAP) - GAP, SIDE + FOOT), export.PAPER)
    pen = ImageDraw.Draw(drawn)
    for i, (name, tile) in enumerate(tiles.items()):
        drawn.paste(Image.fromarray(tile.contiguous().numpy()), (i * (SIDE + GAP), 0))
        middle = (i * (SIDE + GAP) + SIDE // 2, SIDE + FOOT // 2 + 2)
        pen.text(middle, name, fill=export.INK, font=face_for("")(12), anchor="mm")
    return drawn


def main() -> None:
    sheet = export.contact_sheet(export.SceneOptions(16, 0, 160, "train", ()))
    for name, image in (("scenes.png", sheet), ("scenes_styles.png", maps())):
        image.save(IMAGES / name, optimize=True)
        print(f"docs/images/{name}", (IMAGES / name).stat().st_size)


if __name__ == "__main__":
    main()
