"""`pellucid sample`: a model and a prompt → images that carry their recipe; and from such an image back again."""

from __future__ import annotations

from pellucid.cli import sample_options as opt
from pellucid.core.errors import PellucidError

EPILOG = opt.EPILOG


def command(
    model: opt.Model = None,
    prompt: opt.Prompt = None,
    from_file: opt.From = None,
    negative: opt.Negative = None,
    label: opt.Label = None,
    n: opt.Count = None,
    seed: opt.Seed = None,
    size: opt.Size = None,
    sampler: opt.Sampler = None,
    grid: opt.Grid = None,
    steps: opt.Steps = None,
    dialect: opt.Dialect = None,
    option: opt.SamplerOption = None,
    plan: opt.PlanFile = None,
    guidance: opt.GuidanceText = None,
    weak: opt.Weak = None,
    noise: opt.Noise = None,
    image: opt.ImageFile = None,
    mask: opt.Mask = None,
    strength: opt.Strength = None,
    denoising_start: opt.Start = None,
    denoising_end: opt.End = None,
    clip_skip: opt.ClipSkip = None,
    weighting: opt.Weighting = False,
    original_size: opt.OriginalSize = None,
    crop: opt.Crop = None,
    target_size: opt.TargetSize = None,
    aesthetic: opt.Aesthetic = None,
    lora: opt.LoraFile = None,
    control: opt.ControlWords = None,
    image_prompt: opt.ImagePromptWords = None,
    inversion: opt.Inversion = None,
    vae: opt.Vae = None,
    image_encoder: opt.ImageEncoder = None,
    tokenizer: opt.Tokenizer = None,
    target: opt.Target = None,
    variant: opt.Variant = None,
    revision: opt.Revision = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    attention: opt.Attention = None,
    vae_tile: opt.VaeTile = None,
    vae_slicing: opt.VaeSlicing = False,
    channels_last: opt.ChannelsLast = False,
    offload: opt.Offload = None,
    compile: opt.Compile = False,
    batch: opt.Batch = None,
    out: opt.Out = None,
    overwrite: opt.Overwrite = False,
    grid_of: opt.GridOf = None,
    keep_cells: opt.KeepCells = False,
    trace: opt.TraceFile = None,
    trace_tensors: opt.TraceTensors = False,
    as_json: opt.AsJson = False,
) -> None:
    """Make images. Each PNG carries its recipe, as ours and as A1111's `parameters` text.

    Without --sampler the model keeps its own scheduler; without --guidance it gets the guarded default.
    """
    words = dict(locals())  # as typer converted them: what its context holds are texts in some of its versions
    if model is None and from_file is None:  # said before torch is imported
        raise PellucidError("MODEL must be given, or an image with --from; got neither.", "usage")
    from pellucid.cli import sample_run

    sample_run.sample(words)
