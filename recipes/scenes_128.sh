#!/bin/sh
# Trains scenes-128, part by part, and puts the bundle together. Run it from the root of the repository.
#
#   sh recipes/scenes_128.sh                     all of it
#   sh recipes/scenes_128.sh vae text_unet       these runs alone, in the order given; no bundle
#
# It may be stopped at any moment: a run goes on from its last checkpoint, and a finished one is only saved again.
# TRAIN is the command that trains, for several GPUs: TRAIN="torchrun --nproc-per-node 8 -m pellucid.cli train"
set -eu
PYTHON=${PYTHON:-.venv/bin/python}
TRAIN=${TRAIN:-$PYTHON -m pellucid.cli train}

# Each needs only those before it: the VAE in three runs, the UNet with its text encoder in two, then all others.
ALL="vae vae_crowded vae_overlaps text_unet text_unet_layout text_dit text_dit_longer image_text lora controlnet ip_adapter"

for name in ${*:-$ALL}; do
    case " $ALL " in
    *" $name "*) ;;
    *) echo "run must be one of: $ALL; got $name" >&2; exit 2 ;;
    esac
done
for name in ${*:-$ALL}; do
    case "$name" in
    vae* | image_text) ;; # these see images; all others see latents, which are made once and kept
    *) $PYTHON -m pellucid.cli data latents "configs/scenes_$name.toml" ;;
    esac
    $TRAIN "configs/scenes_$name.toml" --out "runs/scenes_$name"
done
if [ $# -eq 0 ]; then
    $PYTHON recipes/make_bundle.py --out src/pellucid/bundles/scenes-128 --overwrite
fi
