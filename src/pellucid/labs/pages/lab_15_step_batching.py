r"""
Lab 15: Step batching
=====================

**Question.** Requests differ in sampler, steps and guidance, and arrive at any time. How can they share one batch, and
what does each of them gain or lose by it?

**Handbook.** :doc:`/handbook/serving`

**Mechanism.** A run is a table with one row per call (:doc:`lab 12 <lab_12_samplers_as_tables>`), and between two calls
an image keeps only x and a few predictions. So the images of a batch need neither the same row nor the same table. A
step looks up a row for each image :math:`i`, calls the network once for all of them, and gives each image its own
weights:

.. math:: x_i' = w_{x,i}\, x_i + w_{0,i}\, p_{0,i} + w_{1,i}\, p_{1,i} + \dots

Between two steps images join and leave. With :math:`t(B)` seconds for a step of :math:`B` images,

.. math::

    \text{latency} = \text{wait} + \text{calls} \times t(B), \quad
    \text{images per second} = \frac{B}{\text{calls} \times t(B)}
"""

import math
import random
import time
from collections import deque
from statistics import mean

import matplotlib.pyplot as plt
import numpy as np
import torch

import pellucid
from pellucid.core.batch import Batch, Entry
from pellucid.core.plan import REGISTERS
from pellucid.labs import few
from pellucid.pipeline.request import Request

# %%
# Rows of different tables
# ------------------------
# Four images, each in the middle of its own run. These are the weights that one step gives them: a matrix with a row
# per image. What a sampler does not use is zero.

steps = {"ddim": 12, "dpmpp_2m": 9, "heun": 5, "euler_a": 7}
plans = [pellucid.compile_plan(name, schedule="cosine", target="v", steps=n) for name, n in steps.items()]
shown = [REGISTERS.index(name) for name in ("x", "anchor", "p0", "p1", "z")]
print("image       row " + "".join(f"{REGISTERS[register]:>9}" for register in shown))
for plan, index in zip(plans, (7, 3, 5, 2), strict=True):
    weights = dict(plan.rows[index].x)
    cells = "".join(f"{weights.get(register, 0.0):9.4f}" for register in shown)
    print(f"{plan.name:<9} {index:>2}/{plan.nfe:<2}{cells}")

# %%
# All four in one batch, and each of them alone, on a density whose denoiser is exact. A batch calls the network as
# often as its longest image needs; the others leave earlier.

density = pellucid.oracle.smooth()
jobs = [pellucid.Job(plan, seed=seed) for seed, plan in enumerate(plans)]
together = pellucid.run_batch(jobs, density, shape=(4,), dtype=torch.float64)
alone = [pellucid.run(job.plan, density, shape=(4,), seeds=[job.seed], dtype=torch.float64) for job in jobs]
apart = float((together - torch.cat(alone)).abs().max())
calls = [plan.nfe for plan in plans]
print(f"{sum(calls)} calls one by one, {max(calls)} together; largest difference {apart:.1e}")
assert apart < 1e-12

# %%
# Join and leave
# --------------
# Six requests to scenes-128, three places. Each arrives at its own step, joins as soon as a place is free and leaves
# after its last row. E is cancelled after two of its steps. An `Entry` is what joins: a plan, a denoiser with its
# inputs, the first x, and where noise comes from.

pipe = pellucid.load("scenes-128")
asked = {
    "A": (0, "a large red star", {"sampler": "euler", "steps": 9, "guidance": 4.0}),
    "B": (0, "a blue circle on a grey background", {"sampler": "dpmpp_2m", "steps": 12, "guidance": "off"}),
    "C": (2, "a large green heart", {"sampler": "deis", "steps": 5, "guidance": 6.0}),
    "D": (4, "a striped yellow square", {"sampler": "unipc", "steps": 4, "guidance": 4.0}),
    "E": (6, "a small pink diamond", {"sampler": "ddim", "steps": 8, "guidance": 5.0}),
    "F": (8, "a large teal cross", {"sampler": "euler_a", "steps": 5, "guidance": "linear:6:3"}),
}
options = {
    name: {"prompt": prompt, "seed": ord(name), "grid": "trailing", **rest} for name, (_, prompt, rest) in asked.items()
}


def entry_of(prepared):
    """One image, ready to join."""
    return Entry([prepared.plan], prepared.denoiser, prepared.start, prepared.noise)


def shared(arrivals, capacity, cancel):
    """Entries by name, and for each step of the batch the row of every image in it. `cancel` is a name and a row."""
    entries = {name: entry_of(pipe.prepare(Request(**options[name]))) for name in arrivals}
    batch, waiting, came, log = Batch(capacity), deque(), deque(sorted(arrivals, key=arrivals.get)), []
    while came or waiting or batch.entries:
        while came and arrivals[came[0]] <= len(log):
            waiting.append(came.popleft())
        while waiting and len(batch) < capacity:
            batch.join(entries[waiting.popleft()])
        log.append({name: one.index for name, one in entries.items() if one in batch.entries})
        batch.step()
        name, row = cancel
        if entries[name] in batch.entries and entries[name].index == row:
            batch.leave(entries[name])
    return entries, log


arrivals = {name: step for name, (step, *_) in asked.items()}
with torch.no_grad():
    entries, log = shared(arrivals, 3, ("E", 2))
began = {name: min(step for step, inside in enumerate(log) if name in inside) for name in asked}
rows_of = {name: 1 if fields["guidance"] == "off" else 2 for name, fields in options.items()}
for name, entry in entries.items():
    inside, plan = [step for step, names in enumerate(log) if name in names], entry.plans[0]
    rows, why = rows_of[name], "cancelled" if entry.error else "done"
    print(
        f"{name}: {plan.name:<8} {plan.nfe:>2} calls of {rows} row{'s' * (rows > 1)}, arrived {arrivals[name]}, "
        f"in steps {inside[0]} to {inside[-1]}, {why}"
    )
assert max(map(len, log)) == 3
assert began["C"] == arrivals["C"]  # nobody had to end for it to join
assert isinstance(entries["E"].error, pellucid.Cancelled)

# %%
# One column per step of the batch, with the row of its plan that each image is at. In the last line: how many rows the
# call of the network has, two for a guided image and one for B.

figure, axis = plt.subplots(figsize=(8.4, 3.1), layout="constrained")
for line, (name, entry) in enumerate(entries.items()):
    waited = began[name] - arrivals[name]
    axis.barh(line, waited, left=arrivals[name], color="none", edgecolor="lightgrey", hatch="////")
    inside = {step: names[name] for step, names in enumerate(log) if name in names}
    for step, row in inside.items():
        axis.barh(line, 1, left=step, color=f"C{line}", edgecolor="white", alpha=0.85)
        axis.text(step + 0.5, line, str(row), ha="center", va="center", fontsize=8, color="white")
    if entry.error:
        axis.text(max(inside) + 1.15, line, "cancelled", va="center", fontsize=8)
for step, names in enumerate(log):
    axis.text(step + 0.5, len(entries), str(sum(rows_of[name] for name in names)), ha="center", va="center", fontsize=8)
labels = [*(f"{name}  {entry.plans[0].name}" for name, entry in entries.items()), "rows of the call"]
axis.set_yticks(range(len(labels)), labels, fontsize=9)
axis.set(xlabel="step of the batch", xticks=range(len(log) + 1), xlim=(0, len(log)), ylim=(len(labels) - 0.5, -0.6))
axis.set_title("Three places: rows of the plans, and waiting (hatched)", fontsize=10)

# %%
# The same images, alone
# ----------------------
# Who was beside an image changes its last bits at most: the kernels of another batch size sum in another order. Above
# the images of the batch, below the same requests one by one.

results = {name: pipe(decode=False, **options[name]) for name in asked if name != "E"}
latents = {name: (entries[name].result, result.latents) for name, result in results.items()}
differences = {name: float((one - other).abs().max()) for name, (one, other) in latents.items()}
print("largest difference of a latent: " + ", ".join(f"{name} {apart:.1e}" for name, apart in differences.items()))
assert max(differences.values()) < 1e-3

# %%
figure, axes = plt.subplots(2, len(latents), figsize=(7.4, 3.2), layout="constrained")
for column, (name, pair) in enumerate(latents.items()):
    for axis, x, how in zip(axes[:, column], pair, ("shared", "alone"), strict=True):
        with torch.no_grad():
            image = pipe.components.vae.decode(x / pipe.components.vae.config.scaling_factor)
        axis.imshow((image[0].permute(1, 2, 0).clamp(-1, 1) + 1) / 2)
        axis.set_title(f"{name}, {how}", fontsize=9)
        axis.set_axis_off()

# %%
# What a step costs
# -----------------
# The fastest of some steps, for batches of several sizes on this machine; every image is guided. One by one, a run of
# 20 calls takes :math:`20\, t(1)`. In a full batch it takes :math:`20\, t(B)`, and :math:`B` images come out of it.

sizes = (1, 2, 4, 8)[: few(4, 3)]
alike = {"prompt": "a red star", "sampler": "dpmpp_2m", "steps": 40, "guidance": 4.0}
ready = [pipe.prepare(Request(**alike, seed=seed)) for seed in range(sizes[-1])]
batches, measured = {size: Batch() for size in sizes}, dict.fromkeys(sizes, math.inf)
with torch.no_grad():
    for size, batch in batches.items():
        for prepared in ready[:size]:
            batch.join(entry_of(prepared))
        batch.step()  # the first one prepares
    for _ in range(few(8, 4)):  # sizes in turns: others may be using the machine
        for size, batch in batches.items():
            start = time.perf_counter()
            batch.step()
            measured[size] = min(measured[size], time.perf_counter() - start)
print("images   ms per step   ms per image   images/s of 20 calls   latency of 20 calls")
for size, took in measured.items():
    print(f"{size:>6} {1000 * took:13.1f} {1000 * took / size:14.1f} {size / (20 * took):22.2f} {20 * took:18.2f} s")
assert measured[sizes[-1]] > measured[1]  # more images per step are never free here

# %%
# Beside it a recorded GPU: SD 1.5 at 512² on an H200 takes 5.45 ms for one guided image and 61 ms for sixteen
# (:doc:`/results/speed`); between them we draw a straight line. If more images cost nothing, the curve would stay at 1.
# At this size even one image keeps most of the GPU busy; a small network on a large GPU stays near 1 for longer.

recorded = {1: 0.00545, 16: 0.061}


def timed(table):
    """t(B) in seconds, on straight lines between the sizes that were measured."""
    return lambda images: float(np.interp(images, list(table), list(table.values())))


machines = {"this machine": timed(measured), "H200, SD 1.5": timed(recorded)}
capacity = sizes[-1]
figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.1), layout="constrained")
counts = range(1, capacity + 1)
left.plot(counts, counts, ":", color="grey", label="one by one")
left.axhline(1, linestyle="--", color="grey", linewidth=1, label="free")
for marker, (name, seconds) in zip("os", machines.items(), strict=True):
    left.plot(counts, [seconds(n) / seconds(1) for n in counts], marker=marker, ms=4, label=name)
    gain = [n * seconds(1) / seconds(n) for n in counts]
    right.plot([seconds(n) / seconds(1) for n in counts], gain, marker=marker, ms=4, label=name)
    for n in (1, capacity):
        right.annotate(f"B = {n}", (seconds(n) / seconds(1), gain[n - 1]), (4, -11), textcoords="offset points", size=8)
left.set(xlabel="images in the step, B", ylabel="t(B) / t(1)", title="Time of a step")
left.legend(fontsize=8)
right.set(xlabel="latency, × alone", ylabel="images per second, × alone", title="Throughput against latency")
right.margins(x=0.2, y=0.12)
right.legend(fontsize=8)

# %%
# Three policies
# --------------
# Requests arrive at random: three of four need 4 to 10 calls, the others 30 to 50. The list is served in three ways.
# *One by one*: one place. *Static*: those that wait begin together, and nobody joins until the last of them has left.
# *Step batching*: whoever waits takes a free place at the next step. This flatters static batches: in most servers
# their images must also have the same sampler and the same number of steps.


def served(requests, seconds, capacity, static=False, rank=None):
    """Latency and wait of each request (arrival, calls), and how many images each step had.

    They join in the order of `rank`; without one, in that of their arrivals.
    """
    left, began, ended = [calls for _, calls in requests], {}, {}
    waiting, running, sizes, now, arrived = [], [], [], 0.0, 0
    while len(ended) < len(requests):
        while arrived < len(requests) and requests[arrived][0] <= now:
            waiting.append(arrived)
            arrived += 1
        if rank:
            waiting.sort(key=lambda i: rank(*requests[i]))
        free = 0 if static and running else capacity - len(running)
        began |= dict.fromkeys(waiting[:free], now)
        running, waiting = running + waiting[:free], waiting[free:]
        if not running:
            now = requests[arrived][0]
            continue
        now += seconds(len(running))
        sizes.append(len(running))
        for i in running:
            left[i] -= 1
            if not left[i]:
                ended[i] = now
        running = [i for i in running if left[i]]
    latency, wait = ([times[i] - requests[i][0] for i in range(len(requests))] for times in (ended, began))
    return latency, wait, sizes


def poisson(per_second, count=600, seed=15):
    """Requests that arrive at random: (arrival, calls)."""
    draw, now, requests = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(per_second)
        requests.append((now, draw.choice((30, 40, 50) if draw.random() < 0.25 else (4, 6, 8, 10))))
    return requests


def rate(images, seconds):
    """Images per second of a batch that is always so full; a request has 15.25 calls on average."""
    return images / (15.25 * seconds(images))


def p95(values):
    return float(np.quantile(values, 0.95))


# %%
# As many requests as 80 % of what the slowest batch size can do. "Images per busy second" leaves out the time when
# there was nothing to do.

policies = {"one by one": (1, False), "static": (capacity, True), "step batching": (capacity, False)}
found = {}
for machine, seconds in machines.items():
    requests = poisson(0.8 * min(rate(n, seconds) for n in counts))
    print(f"{machine:<15} mean s   p95 s   short: mean, p95   long: mean, p95   images/busy s   images/step")
    for policy, (places, static) in policies.items():
        latency, _, inside = served(requests, seconds, places, static)
        short = [took for took, (_, calls) in zip(latency, requests, strict=True) if calls <= 10]
        long = [took for took, (_, calls) in zip(latency, requests, strict=True) if calls > 10]
        busy = len(requests) / sum(map(seconds, inside))
        row = mean(latency), p95(latency), mean(short), p95(short), mean(long), p95(long), busy, mean(inside)
        found[machine, policy] = row
        print("  {:<13} {:6.2f} {:7.2f} {:12.2f} {:6.2f} {:10.2f} {:6.2f} {:15.2f} {:13.1f}".format(policy, *row))

# %%
# Short requests gain most: they join beside the long ones and do not wait for their end. Long ones share every step
# with whoever comes, and end later than in a static batch, which admits nobody. Since the slowest 5 % are long ones,
# the p95 of all hides the gain.

figure, axes = plt.subplots(2, 3, figsize=(8.6, 5), layout="constrained")
for line, machine in zip(axes, machines, strict=True):
    rows = [found[machine, policy] for policy in policies]
    at = np.arange(len(policies))
    for axis, name, columns in zip(line, ("mean latency", "p95 latency"), ((2, 4, 0), (3, 5, 1)), strict=False):
        for shift, column, who in zip((-0.27, 0, 0.27), columns, ("short", "long", "all"), strict=True):
            colour = {"short": "tab:blue", "long": "tab:orange", "all": "lightgrey"}[who]
            axis.bar(at + shift, [row[column] for row in rows], 0.25, label=who, color=colour)
        axis.set(title=f"{name}, s", xticks=at)
    line[2].bar(at, [row[6] for row in rows], 0.5, color="tab:green")
    line[2].set(title="images per busy second", xticks=at)
    line[0].set_ylabel(machine)
    for axis in line:
        axis.set_xticklabels(["one by\none", "static", "step\nbatching"], fontsize=9)
        axis.title.set_size(10)
figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)
one, static, step = (found["H200, SD 1.5", policy] for policy in policies)
assert step[3] < 0.7 * min(one[3], static[3])  # p95 of the short ones
assert step[0] < static[0] < one[0]  # mean of all
assert step[6] > static[6] > one[6]  # images per busy second
assert step[4] > static[4]  # the price: mean of the long ones

# %%
# What to notice
# --------------
# - Nobody waits for the longest plan: an image is in as many steps as its own plan has rows.
# - A guided image is two rows of the call, an unguided one is one. A free place is therefore not always the same
#   amount of work.
# - Throughput gains only what the machine leaves idle at B = 1: with eight images 1.4 × for SD 1.5 at 512² on an H200,
#   and less on most CPUs. Most of the gain in latency comes from joining at once, not from speed.
# - The work of a request is known on arrival: `plan.nfe` calls. A server can therefore predict, refuse and order.
#
# What goes wrong
# ---------------
# **"The larger the batch, the better."** Sixteen requests of 20 calls are there at once. More places make more images
# per second, to the end. The mean latency is lowest at two to four places: with all sixteen, nobody has an image
# before everybody has one.

seconds, burst = machines["H200, SD 1.5"], [(0.0, 20)] * 16
means, speeds = {}, {}
for places in (1, 2, 4, 8, 16):
    latency, _, inside = served(burst, seconds, places)
    means[places], speeds[places] = mean(latency), len(burst) / sum(map(seconds, inside))
    print(f"  {places:>2} places: {speeds[places]:5.2f} images/s, mean latency {means[places]:.2f} s")
assert max(speeds, key=speeds.get) == 16
assert max(means, key=means.get) == 16
assert min(means, key=means.get) in (2, 4)

# %%
# **"First come, first served is fair" and "then the shortest first".** Four places, a little more traffic than they
# can do. In the order of arrival, a request of 4 calls waits as long as one of 50. With the shortest first it hardly
# waits, and there is always a shorter one than the long ones: they starve.

crowd = poisson(1.1 * rate(4, seconds))
waits = {}
for name, rank in (("first come", None), ("shortest first", lambda arrival, calls: calls)):
    _, wait, _ = served(crowd, seconds, 4, rank=rank)
    short, long = (
        [w for w, (_, calls) in zip(wait, crowd, strict=True) if (calls <= 10) == few_calls]
        for few_calls in (True, False)
    )
    waits[name] = mean(short), max(long)
    print(f"  {name:<15} short ones wait {mean(short):5.2f} s on average, the unluckiest long one {max(long):5.2f} s")
assert waits["shortest first"][0] < 0.5 * waits["first come"][0]
assert waits["shortest first"][1] > 2 * waits["first come"][1]

# %%
# **"The batch draws its noise."** One generator for the whole batch gives an image the noise of its *place*, and its
# place depends on who came before it. Noise with an address (seed, step, element) is the same everywhere.

drawn = [torch.randn(n, 4, 16, 16, generator=torch.Generator().manual_seed(7))[-1] for n in (1, 3)]
named = [pellucid.Philox(seeds).first((4, 16, 16), torch.empty(0), [len(seeds) - 1])[0] for seeds in ([7], [5, 6, 7])]
print(f"  one generator: equal is {torch.equal(*drawn)}; by address: equal is {torch.equal(*named)}")
assert not torch.equal(*drawn)
assert torch.equal(*named)

# %%
# **"Then everything can share."** Registers have one shape and a call has one set of weights. Another size is another
# batch, and a full one takes nobody; both are said before anything runs.

codes, batch = [], Batch(capacity=1)
batch.join(entry_of(ready[0]))
for other in (pipe.prepare(Request(**alike, width=64, height=64)), ready[1]):
    try:
        batch.join(entry_of(other))
    except pellucid.PellucidError as error:
        codes.append(error.code)
        print(f"  error[{error.code}]: {error}")
assert codes == ["shape", "capacity"]

# %%
# What to watch
# -------------
# The same traffic with eight places on the recorded GPU, at growing shares of what a full batch can do. Requests come
# in bursts: at 85 % the batch is half empty on average, and one request in twenty waits for more than a second. So the
# wait is the alarm, not the mean occupancy. Beyond 1 only refusing helps: the wait grows as long as the traffic lasts.

print("  load   images/step   of 8   p50 s   p95 s   p95 of the wait s   wait, share of latency")
shares = {}
for load in (0.5, 0.7, 0.85, 0.95, 1.1):
    latency, wait, inside = served(poisson(load * rate(8, seconds), few(6000, 1500)), seconds, 8)
    shares[load] = sum(wait) / sum(latency)
    cells = mean(inside), mean(inside) / 8, float(np.median(latency)), p95(latency), p95(wait), shares[load]
    print("  {:4.2f} {:13.1f} {:6.0%} {:7.2f} {:7.2f} {:19.2f} {:24.0%}".format(load, *cells))
    if load == 0.85:
        assert mean(inside) < 0.6 * 8
        assert p95(wait) > 1
assert shares[0.5] < 0.1
assert shares[1.1] > 0.5

# %%
# - **Wait and steps apart.** A mean over all requests shows neither the queue nor the short ones.
# - **Images per step.** Low while requests wait: they cannot share, because of sizes, LoRAs or kinds of rules. Full
#   while requests wait: the machine is too small.
# - **Milliseconds of a step by its size.** If :math:`t(B)` grows at the same B, somebody else uses the machine.
# - **The age of the oldest that waits**, by kind of request. It shows starvation, which no mean shows.
#
# Say it in an interview
# ----------------------
# "A sampler is a table, so each image of a batch has its own row: I gather (B,) levels, times and weights, call the
# network once on the latents (B, C, h, w), 2B rows with guidance, and combine. Images join and leave between steps and
# are the same as alone up to rounding, because noise is addressed by seed. Latency is wait plus calls × t(B).
# Throughput rises only while t(B) grows slower than B; beyond that a larger batch only makes everyone later. Compared
# with static batches, short requests gain most and long ones lose a little, so I order by deadline or by arrival plus
# work, keep a place for short ones, and bound every wait. I watch the wait, images per step and t(B)."
#
# Your turn
# ---------
# ``pellucid lab 15 --starter answer.py``: a step of a mixed batch, the latency of a request, the best number of places
# within a limit, and who joins next, so that short requests pass long ones and nobody starves. Hidden lists of arrivals
# test it. Then ``pellucid lab 15 --check answer.py``.
#
# Further reading
# ---------------
# - Yu et al., *Orca: A Distributed Serving System for Transformer-Based Generative Models*, OSDI 2022: joining and
#   leaving between the iterations of a language model.
# - Kodaira et al., *StreamDiffusion: A Pipeline-level Solution for Real-time Interactive Generation*, arXiv:2312.12491:
#   images at different steps of one sampler in one call.
# - :doc:`/serve` runs what this page shows; :doc:`/decisions/0026-serving-is-a-step-batch` says why it is built so;
#   :doc:`/results/batch_size` measures an image alone and in a batch.
