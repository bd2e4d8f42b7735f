r"""
Lab 10: Where the bytes are
===========================

**Question.** Which part of a run needs how much memory, can it be known before the run, and what does each saving cost?

**Handbook.** :doc:`/handbook/memory_and_speed`

**Mechanism.** At any moment of a run there live the *weights* of the networks that are on the device, the *activations*
of the operation at work and of those that wait for it (skips), and what a kernel borrows. The need of a run is the
fullest moment:

.. math:: \text{peak} = \max_{\text{operations}} \Big( \text{weights} + \sum_{\text{living}} \text{activations} \Big)

Weights do not grow with the image. Activations grow with its area, the maps of attention with the area *squared*.
"""

import copy
import time
from dataclasses import replace

import matplotlib.pyplot as plt
import torch
from torch.nn import functional

import pellucid
from pellucid.labs import few
from pellucid.pipeline.compare import measure
from pellucid.pipeline.memory import predict, request_for, size_text
from pellucid.pipeline.model import networks_by_name

pipe = pellucid.load("scenes-128")

# %%
# Weights
# -------
# A file of float16 is read as float32 on a CPU: four bytes a number.

for name, network in networks_by_name(pipe.components).items():
    numbers = sum(p.numel() for p in network.parameters())
    print(f"  {name:<13} {numbers / 1e6:5.2f} M numbers  {size_text(4 * numbers):>8} in float32")

# %%
# Predicted, and measured
# -----------------------
# `pellucid memory scenes-128` does what these lines do. The prediction runs the pipeline's own code on tensors that
# have a shape and no data, and counts what lives, operation by operation. The measurement counts the same in a real
# run.

steps = few(2, 1)  # a second step needs no more than the first, except for its history
request = request_for(pipe, steps=steps)
forecast = predict(pipe, request)
took = measure(pipe, request)
print(f"{'stage':<8} {'weights':>9} {'activations':>12} {'predicted':>10} {'measured':>9}   owner of the peak")
for stage, peak in forecast.stages.items():
    row = (size_text(n) for n in (peak.weights, peak.activations, peak.total, took.peaks[stage]))
    print("{:<8} {:>9} {:>12} {:>10} {:>9}   {}".format(stage, *row, peak.owner))
assert abs(forecast.peak.total / took.peak - 1) < 0.01
assert forecast.stage == "decode"

# %%
# With the size of the image
# ----------------------------
# Weights stay, activations follow the area. The decoder of the VAE works on whole images, the UNet on latents of an
# eighth of the side: the last stage of the run, which is called once, owns the peak.

sides = (128, 256, 512, 1024)[: few(4, 2)]
asked = {side: request_for(pipe, size=(side, side), steps=steps) for side in sides}
forecasts = {side: predict(pipe, one) for side, one in asked.items()}
for side, found in forecasts.items():
    unet = size_text(found.stages["denoise"].total)
    print(f"  {side:>4}²  peak {size_text(found.peak.total):>8} in {found.stage}, UNet {unet}")
first, second = (forecasts[side].stages["decode"].activations for side in sides[:2])
assert 3.8 < second / first < 4.2  # four times the area

# %%
# Weights are a flat line. Activations are straight ones of slope 2 in the side, which is 1 in the area.

lines = {"weights, all networks": [found.peak.weights for found in forecasts.values()]}
for stage, label in (("denoise", "activations of the UNet"), ("decode", "activations of the decoder")):
    lines[label] = [found.stages[stage].activations for found in forecasts.values()]
fig, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for label, sizes in lines.items():
    axis.loglog(sides, [size / 2**20 for size in sizes], marker="o", label=label)
axis.set(xlabel="side of the image, pixels", ylabel="MiB at the peak", title="What grows with the image")
axis.set_xticks(sides, [str(side) for side in sides])
axis.minorticks_off()
axis.legend()

# %%
# Attention
# ---------
# A map of attention has (length)² numbers for each head, and length is the number of latents. A fused kernel never
# holds the map. The kernel `math` does, and then the UNet owns the peak.

side = few(512, 256)
math = predict(pipe, asked[side], policy=pellucid.Policy(attention="math"))
for kernel, found in (("auto", forecasts[side]), ("math", math)):
    at = found.stages["denoise"]
    print(f"  {kernel:<5} UNet {size_text(at.activations):>8} of activations, held at {at.owner}")
length, heads = (side // 8) ** 2, pipe.components.network.config.attention_head_dim[0]
maps = 2 * heads * length**2 * 4  # cond and uncond, float32
print(f"  one map of attention: 2 × {heads} heads × {length}² × 4 bytes = {size_text(maps)}")
assert at.activations > maps

# %%
# Slicing and tiling
# ------------------
# Slicing decodes one image of a batch at a time; tiling decodes bands of one image. Both reduce activations of the
# decoder and nothing else. Here they are measured, with the time of the decoder and the change of the image.

wide = few(256, 128)
policies = {"default": {}, "vae_slicing": {"vae_slicing": True}, "vae_tile=16": {"vae_tile": 16}}
rows, images = {}, {}
for name, fields in policies.items():
    one = pellucid.Pipeline(pipe.components, pellucid.Policy(**fields))  # the same networks
    rows[name] = measure(one, request_for(one, size=(wide, wide), batch=2, steps=1))
    images[name] = torch.stack([torch.tensor(list(i.tobytes())) for i in rows[name].result.images]).float()
    apart = float((images[name] - images["default"]).abs().max())
    peak, seconds = rows[name].peaks["decode"], rows[name].seconds["decode"]
    print(
        f"  {name:<12} decode {size_text(peak):>8}, {1000 * seconds:4.0f} ms, pixels change by {apart:g} of 255 at most"
    )
assert rows["vae_slicing"].peaks["decode"] < rows["default"].peaks["decode"]
assert rows["vae_slicing"].peaks["denoise"] == rows["default"].peaks["denoise"]

# %%
# What to notice
# --------------
# - The peak is a moment, and it has an owner. What does not reduce *that* moment reduces nothing: slicing leaves the
#   UNet's stage as it was.
# - The prediction needs no formula of a network and no memory: it can be made for a GPU that is not here. On an H200 it
#   was within 1.8 % for every policy in the default layout but one (:doc:`/results/memory`).
# - Our tiles are the untiled image up to rounding, since norms see the whole image. Tiles that do not agree on
#   their statistics have seams.
#
# What goes wrong
# ---------------
# **"Half the precision is half the time."** It is half the *bytes*: of weights and of activations. What a number costs
# depends on whether the processor has instructions for it. Here is one convolution of the decoder in three dtypes.

x, kernel = torch.randn(1, 32, few(128, 64), few(128, 64)), torch.randn(32, 32, 3, 3)
milliseconds = {}
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    a, b = x.to(dtype), kernel.to(dtype)
    functional.conv2d(a[..., :8], b, padding=1)  # the first call of a shape or dtype prepares
    began = time.perf_counter()
    functional.conv2d(a, b, padding=1)
    milliseconds[dtype] = 1000 * (time.perf_counter() - began)
    print(f"  {dtype!s:<15} {size_text(a.nbytes):>8}  {milliseconds[dtype]:8.1f} ms")
ratio = milliseconds[torch.float16] / milliseconds[torch.float32]
print(f"float16 takes {ratio:.1f} times as long as float32")
assert ratio > 0.6  # not half; on a CPU without float16 arithmetic many times as long

# %%
# The bytes are halved indeed, and the image is not quite the same.

small = copy.deepcopy(pipe.components.network).to(torch.bfloat16)
half = pellucid.Pipeline(replace(pipe.components, network=small))
options = {
    "sampler": "dpmpp_2m",
    "grid": "trailing",
    "steps": few(8, 2),
    "guidance": few(4, 1),
    "seed": 3,
    "decode": False,
}
share = predict(pipe, request, dtype=torch.bfloat16).peak.total / forecast.peak.total
latents = [p("a large red star on a grey background", **options).latents for p in (pipe, half)]
apart = float((latents[1] - latents[0]).square().mean().sqrt() / latents[0].square().mean().sqrt())
print(f"peak in bfloat16: {share:.2f} of that in float32; latents differ by {apart:.2%}")
assert 0.45 < share < 0.55
assert apart > 1e-4

# %%
# **"Offload is free memory."** On a CPU there is no other place: the policy refuses it. For a GPU it can be predicted
# from here: at the size of this model it saves little, because weights are not what is large. What it costs, it costs
# on the bus: the weights cross it once a run (`component`) or once *a step* (`block`).

try:
    predict(pipe, request, policy=pellucid.Policy(offload="component"))
    code = None
except pellucid.PellucidError as error:
    code = error.code
    print(f"error[{code}]: {error}")
assert code == "policy"

# %%
# What 20 steps would send, in bfloat16:

weights = sum(p.nbytes for p in small.parameters())
for offload, crossings in (("block", 20), ("none", 0), ("component", 1))[: few(3, 1)]:
    policy = pellucid.Policy(offload=offload)
    peak = size_text(predict(pipe, asked[side], policy=policy, device="cuda", dtype=torch.bfloat16).peak.total)
    print(f"  {offload:<9} {peak:>8} at {side}², and the UNet's {size_text(crossings * weights)} cross the bus")

# %%
# On SDXL, where weights are large, the same choice takes a measured 9,085 MiB to 2,633 MiB (:doc:`/results/memory`,
# 1024², one image).
#
# **"The model has 12 MB, so a run needs 12 MB."** The file is float16; the run has float32 weights, activations on top,
# and a batch has more of these.

batches = {1: forecast, 8: predict(pipe, request_for(pipe, batch=8, steps=steps))}
for n, found in batches.items():
    print(f"  batch {n}: {size_text(found.peak.total)} at the peak, {size_text(found.peak.weights)} of it weights")
one, many = batches.values()
assert many.peak.weights == one.peak.weights
assert many.peak.activations > 2 * one.peak.activations

# %%
# Say it in an interview
# ----------------------
# "Memory is weights plus the activations that live at the fullest moment. Weights are parameters × bytes and do not
# depend on the request; activations scale with batch × height × width, and unfused attention with (h·w/64)² a head. In
# text-to-image the decoder owns the peak, (B, C, H, W) at full resolution, although the UNet does most of the work: so
# I tile or slice the VAE first, which costs a little time and no quality. Then dtype, which halves both; then offload,
# which trades bus traffic for weights. I measure the peak by stage before I choose."
#
# Your turn
# ---------
# ``pellucid lab 10 --starter answer.py``: bytes of weights, bytes of a map of attention, the peak of a list of events,
# and which saving helps. Then ``pellucid lab 10 --check answer.py``.
#
# Further reading
# ---------------
# - Dao et al., *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, arXiv:2205.14135
# - Rabe and Staats, *Self-attention Does Not Need O(n²) Memory*, arXiv:2112.05682
# - :doc:`/memory` and :doc:`/results/memory`: the policy, and every prediction against an H200
