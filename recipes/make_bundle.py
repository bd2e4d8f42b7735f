"""Puts the runs of scenes_128.sh together as a bundle: `python recipes/make_bundle.py --out FOLDER`.

Runs that are not there are left out, but for the base. Figures are files of what was measured, for the card.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pellucid.cli import trouble
from pellucid.core.errors import PellucidError
from pellucid.train.bundle import BundleRuns, ModelCard, assemble

HERE = Path(__file__).parent
RUNS = {
    "base": "scenes_text_unet_layout",
    "vae": "scenes_vae_overlaps",
    "dit": "scenes_text_dit_longer",
    "controlnet": "scenes_controlnet",
    "ip_adapter": "scenes_ip_adapter",
    "lora": "scenes_lora",
    "image_text": "scenes_image_text",
}
EARLIER = {  # runs that one of those went on from
    "vae, first run": "scenes_vae",
    "vae, second run": "scenes_vae_crowded",
    "base, first run": "scenes_text_unet",
    "dit, first run": "scenes_text_dit",
}


def main() -> int:
    words = argparse.ArgumentParser(description="Make the bundle scenes-128 of finished runs.")
    words.add_argument("--runs", type=Path, default=Path("runs"), help="the folder of the runs")
    words.add_argument("--out", type=Path, required=True, help="the bundle, such as src/pellucid/bundles/scenes-128")
    words.add_argument(
        "--figures", type=Path, nargs="*", default=[], help="JSON or Markdown files of what was measured"
    )
    words.add_argument("--hardware", default="", help="what it was trained on, in words")
    words.add_argument("--overwrite", action="store_true", help="replace an older bundle")
    asked = words.parse_args()
    found = {part: asked.runs / name for part, name in RUNS.items() if (asked.runs / name / "model").is_dir()}
    earlier = {part: asked.runs / name for part, name in EARLIER.items() if (asked.runs / name / "model").is_dir()}
    card = ModelCard(HERE / "scenes_128_card.md", tuple(asked.figures), asked.hardware, earlier)
    try:
        if "base" not in found:
            raise PellucidError(f"{asked.runs / RUNS['base']} must be a finished run; it is not.", "bundle-run")
        sizes = assemble(BundleRuns(**found), asked.out, card, overwrite=asked.overwrite)
    except PellucidError as error:
        return trouble(error.code, str(error))
    for name, size in sizes.items():
        print(f"{name:12} {size / 1e6:6.2f} MB")
    print(f"{'all':12} {sum(sizes.values()) / 1e6:6.2f} MB → {asked.out}")
    for part in RUNS.keys() - found.keys():
        print(f"left out, for there is no run of it: {part}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
