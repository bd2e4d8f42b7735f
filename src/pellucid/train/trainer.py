"""The training loop. Every step is a function of its number, so a killed run resumes as if it had not stopped."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pellucid.core.errors import PellucidError, rule
from pellucid.core.reader import read_json
from pellucid.interop.atomic_files import is_left, is_part, put
from pellucid.interop.lock import locked
from pellucid.interop.weights import some
from pellucid.models.blocks import ResnetBlock, TransformerBlock
from pellucid.models.dit_blocks import Block
from pellucid.train import optimizer as adamw
from pellucid.train.adapters import FrozenPart
from pellucid.train.checkpoint import Checkpoints, from_first
from pellucid.train.config import TrainConfig, chosen, to_plain
from pellucid.train.draws import Draws, Order, mixed
from pellucid.train.journal import Journal
from pellucid.train.kinds import DATA, TASKS, Task
from pellucid.train.objective import BatchLoss, ByLevel
from pellucid.train.optimizer import EMA
from pellucid.train.ranks import Ranks
from pellucid.train.source import Feed, Source, differences, inventory_of

# --- A step as one CUDA graph ---------------------------------------------------------------------------------------

StepInputs = Sequence[Mapping[str, Tensor]]
_WARM_UP = 3


class _CapturedStep:
    """`step(asked)`, captured. What it changes (`state`) is put back after the warm-up rounds, so that
    a captured run takes the same steps as any other."""

    def __init__(self, step: Callable[[StepInputs], tuple[Tensor, ...]], state: Callable[[], list[Tensor]]) -> None:
        self.step, self.state = step, state
        self.graph = torch.cuda.CUDAGraph()
        self.held: list[dict[str, Tensor]] = []
        self.out: tuple[Tensor, ...] = ()

    def __call__(self, asked: StepInputs) -> tuple[Tensor, ...]:
        for held, given in zip(self.held, asked, strict=True):
            for name, tensor in given.items():
                held[name].copy_(tensor, non_blocking=True)
        self.graph.replay()
        return tuple(tensor.clone() for tensor in self.out)

    def capture(self, asked: StepInputs) -> None:
        """Once, before the first call and before another thread uses the GPU."""
        if self.held:
            return
        self.held = [{name: tensor.cuda().clone() for name, tensor in part.items()} for part in asked]
        before = [tensor.clone() for tensor in self.state()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self.step(self.held)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(self.state(), before, strict=True):
            tensor.copy_(value)
        gc.collect()  # or the graph of a run that is over might be taken down within this capture
        # Other threads (the feed) may go on using the GPU: only what this one does is captured.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.out = self.step(self.held)


# --- Activations computed again -------------------------------------------------------------------------------------

_BLOCKS = (ResnetBlock, TransformerBlock, Block)


def recompute(network: nn.Module) -> int:
    """Makes every residual and transformer block forget its activations; says how many there are."""
    trees = [network, *_frozen_in(network)]
    found = {id(module): module for tree in trees for module in tree.modules() if isinstance(module, _BLOCKS)}
    if not found:
        raise PellucidError(rule("recompute", "for a network of residual or transformer blocks", "none"), "recompute")
    for module in found.values():
        dice = bool(getattr(module, "dropout", 0.0))  # else none are thrown, and a captured step need not read them
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=dice)
    return len(found)


def _frozen_in(network: nn.Module) -> list[nn.Module]:
    """The base models of adapters: not among their submodules, but gradients pass through them."""
    bases = [getattr(module, "base", None) for module in network.modules()]
    return [base.held for base in bases if isinstance(base, FrozenPart) and isinstance(base.held, nn.Module)]


# --- The loop -------------------------------------------------------------------------------------------------------

CONFIG, MODEL, _CHECKPOINTS = "config.json", "model", "checkpoints"
_LONG = 8  # half-lives that a running mean should have behind it at the end: 1/256 of it is then from before


@dataclass(frozen=True)
class TrainingResult:
    """A run that came to its end: its folder, its steps, and the seconds that this process spent on it."""

    folder: Path
    steps: int
    seconds: float
    skipped: int  # images that any rank could not read


class Trainer:
    """A run on its way. `task` and `source` come from the config, or are given."""

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        ranks: Ranks,
        *,
        task: Task | None = None,
        source: Source | None = None,
        quiet: bool = False,
    ) -> None:
        self.config, self.folder, self.ranks, self.quiet = config, folder, ranks, quiet
        engine = config.engine
        self.parts = ranks.world * engine.accumulate
        if config.batch % self.parts:
            must = f"a multiple of ranks × accumulate ({ranks.world} × {engine.accumulate})"
            raise PellucidError(rule("batch", must, config.batch), "batch-parts")
        if engine.capture and (ranks.world > 1 or ranks.device.type != "cuda"):
            raise PellucidError(rule("engine.capture", "false without exactly one GPU", True), "capture")
        self.source = chosen(config.data, DATA, "data").open() if source is None else source
        self.order = Order(len(self.source), config.batch, config.seed, shuffled=not self.source.endless)
        made = chosen(config.task, TASKS, "task").build(config.seed, ranks.device) if task is None else task
        self.task: Task = made
        self.network = self.task.network.train()
        if ranks.device.type == "cuda":
            torch.backends.cudnn.benchmark = True
            self.network.to(memory_format=torch.channels_last)
        if engine.recompute:
            recompute(self.network)
        self.asked = ranks.wrap(self.network, torch.bfloat16 if engine.dtype == "bf16" else None)
        self.compiled: Any = torch.compile(self.asked, dynamic=False) if engine.compile else self.asked
        self.optimizer = adamw.build(self.network, config.optimizer, capture=engine.capture)
        self.ema = EMA(self.network, config.ema) if config.ema else None
        self.checkpoints = Checkpoints(folder / _CHECKPOINTS, config.log.keep)
        self.advance: Callable[[StepInputs], tuple[Tensor, ...]] = self.one_step
        if engine.capture:
            self.advance = _CapturedStep(self.one_step, lambda: list(self.live().values()))
        self.bins = ByLevel()
        self.window: list[tuple[Tensor, Tensor]] = []
        self.saved_at = -1

    # --- one step

    def prepare(self, step: int) -> list[dict[str, Tensor]]:
        """The inputs of a step, one set for each micro-step of this rank."""
        asked = []
        for micro in range(self.config.engine.accumulate):
            part = self.ranks.rank * self.config.engine.accumulate + micro
            draws = Draws(self.config.seed, step, self.config.batch, part, self.parts)
            batch = self.source.batch(self.order.step(step, part, self.parts), draws, self.ranks.device)
            made = self.task.prepare(batch, draws)
            # All of it is sent here, where a step need not wait for it.
            asked.append({name: tensor.to(self.ranks.device, non_blocking=True) for name, tensor in made.items()})
        return asked

    def one_step(self, asked: StepInputs) -> tuple[Tensor, ...]:
        """Forward, backward and update: (loss, gradient norm, errors, λ), still on the device."""
        engine, clip = self.config.engine, self.config.optimizer.clip
        self.optimizer.zero_grad(set_to_none=True)
        graded: list[BatchLoss] = []
        for micro, part in enumerate(asked):
            with self.ranks.syncing(self.asked, micro == len(asked) - 1):
                with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=engine.dtype == "bf16"):
                    graded.append(self.task.loss(self.compiled, part))
                (graded[-1].loss / len(asked)).backward()
        norm = self.ranks.clip(self.network, clip or math.inf)
        self.optimizer.step()
        loss = torch.stack([g.loss.detach() for g in graded]).mean()
        return loss, norm.detach(), torch.cat([g.errors for g in graded]), torch.cat([g.lam for g in graded])

    # --- what is kept

    def live(self) -> dict[str, Tensor]:
        """The tensors that a step changes, except the running means."""
        network = {f"network/{k}": v for k, v in self.network.state_dict().items()}
        return network | {f"optimizer/{k}": v for k, v in adamw.state(self.network, self.optimizer).items()}

    def state(self) -> dict[str, Tensor]:
        means = {} if self.ema is None else {f"ema/{k}": v for k, v in self.ema.state().items()}
        return self.live() | means

    def save(self, step: int) -> None:
        if step == self.saved_at:
            return
        meta = {"step": step, "config": to_plain(self.config), "fingerprint": self.config.fingerprint()}
        self.checkpoints.save(step, self.state(), meta)
        self.saved_at = step

    def resume(self) -> int:
        """The step to resume from: 0, or that of the newest intact checkpoint."""
        step, damaged = self.checkpoints.latest(), self.checkpoints.damaged
        if step is None and damaged:
            advice = f"Remove {self.checkpoints.folder} to start over, or choose another --out."
            line = f"at least one checkpoint must be intact; all are damaged ({some(damaged)}). {advice}"
            raise PellucidError(line, "checkpoint-damaged")
        if step is None:
            return 0
        state = self.state()
        self.checkpoints.load(step, state)
        if self.ema is not None:
            self.ema.restore({k.removeprefix("ema/"): v for k, v in state.items() if k.startswith("ema/")})
        self.saved_at = step
        return step

    def check_folder(self) -> None:
        """Refuses a folder that another config began, or that holds something else."""
        path, done = self.folder / CONFIG, max(self.checkpoints.steps(), default=0)
        if path.exists():
            got = self.other_than(path)
            if got:
                line = f"config must be the one that began {self.folder}; got {got}. Choose another --out."
                raise PellucidError(line, "resume-config")
        elif self.folder.exists() and not all(map(is_left, self.folder.iterdir())):
            raise PellucidError(rule("--out", "empty, new, or a run of this config", str(self.folder)), "out-taken")
        if done > self.config.steps:
            must = f"at least {done}, the steps that {self.folder} has done"
            raise PellucidError(rule("steps", must, self.config.steps), "resume-steps")

    def other_than(self, path: Path) -> str:
        """How this config differs from the one in a file; empty if it does not."""
        try:
            held = read_json(path, foreign=True)
            if held["fingerprint"] == self.config.fingerprint():
                return ""
            names = self.config.unlike(held["config"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"a {CONFIG} that cannot be read"
        return f"another {some(names)}" if names else "one of another version"

    @cached_property
    def inventory(self) -> dict[str, int | str]:
        return inventory_of(self.source)

    def data_since_start(self) -> str:
        """How the data are not those that the folder's run began with; empty where they are, or where it is not known:
        runs of older versions kept no inventory."""
        try:
            then = read_json(self.folder / CONFIG, foreign=True).get("data")
        except PellucidError:
            return ""
        return differences(then, self.inventory) if isinstance(then, dict) else ""

    def take_folder(self, held: ExitStack) -> None:
        """Locks the folder, and takes away what a killed run left in it; on the first rank, for all."""
        try:
            held.enter_context(locked(self.folder, "trained"))
        except OSError as error:
            advice = f"{error.strerror or error}."
            raise PellucidError(rule("--out", "one that can be written to", str(self.folder), advice), "file") from None
        self.checkpoints.clear()
        for path in [*self.folder.iterdir(), *self.folder.glob("pictures/.*")]:
            if is_part(path):
                path.unlink()
            elif re.fullmatch(rf"\.{MODEL}\.\w{{8}}", path.name):  # of `interop.save`
                shutil.rmtree(path)

    def claim(self) -> None:
        """Makes the folder this run's own."""
        held = {"fingerprint": self.config.fingerprint(), "config": to_plain(self.config)}
        self.ranks.barrier()
        if self.ranks.is_first:
            held["data"] = self.inventory
            put(self.folder / CONFIG, json.dumps(held, indent=1))
        self.ranks.barrier()

    # --- the run

    def run(self, until: int | None = None, *, data_changed: bool = False) -> TrainingResult:
        """Trains to the end, or to step `until` of the config's steps. With `data_changed` a run continues with other
        data than it began with, and its log says so."""
        begun = time.perf_counter()
        self.prepare(0)  # data that do not fit are refused before anything is written
        self.check_folder()
        with ExitStack() as held:
            from_first(lambda: self.take_folder(held))
            last = self.train_to(min(until or self.config.steps, self.config.steps), data_changed)
        skipped = self.ranks.union(getattr(self.source, "unreadable", ()))
        return TrainingResult(self.folder, last, time.perf_counter() - begun, len(skipped))

    def train_to(self, until: int, data_changed: bool) -> int:
        """From the last checkpoint to a step; the step at which it ends."""
        self.check_folder()  # again: another process may have been in it before it was ours
        first = self.resume()
        other = from_first(self.data_since_start) if first else ""
        if other and not data_changed:
            advice = "Restore it, choose another --out, or pass --data-changed to continue."
            must = f"data must be the same as when {self.folder} began"
            raise PellucidError(f"{must}; got {other}. {advice}", "data-changed")
        self.claim()
        last = max(first, until)
        journal = self.journal(first)
        if journal is not None:
            for note in getattr(self.source, "notes", ()):
                journal.say(note)
            for name in self.checkpoints.damaged:
                journal.say(f"damaged checkpoint, so the one before it is taken: {name}")
            if other:
                journal.note(first, f"continues from step {first} with other data than it began with: {other}")
            for length in self.config.ema:
                if _LONG * length > (images := self.config.steps * self.config.batch):
                    journal.say(
                        f"ema {length:,.0f} is long for a run of {images:,} images: its mean remembers the start"
                    )
        try:
            alone = self.compile_alone(first, last, journal)
            with Feed(self.prepare, alone, last, device=self.ranks.device) as feed:
                for step, asked in zip(range(alone, last), feed, strict=True):
                    self.take(step, asked, last, journal)
        finally:
            if journal is not None:
                journal.close()
        if last == self.config.steps:
            self.finish()
        return last

    def compile_alone(self, first: int, last: int, journal: Journal | None) -> int:
        """Captures, or takes the first step, if there is something to compile; the step that the feed begins with.

        torch's tracers patch modules for the whole process: no other thread may run one, or use the GPU, meanwhile."""
        if first < last and isinstance(self.advance, _CapturedStep):
            self.advance.capture(self.prepare(first))
        elif first < last and self.config.engine.compile:
            self.take(first, self.prepare(first), last, journal)
            return first + 1
        return first

    def take(self, step: int, asked: StepInputs, last: int, journal: Journal | None) -> None:
        """One step, and what is due after it."""
        self.step(step, asked)
        done, log = step + 1, self.config.log
        if done % log.every == 0 or done == last:
            self.report(done, journal)
        if log.pictures_every and done % log.pictures_every == 0:
            self.draw(done, journal)
        if done == last or (log.checkpoint_every and done % log.checkpoint_every == 0):
            self.save(done)  # last: what a kill cut off before it comes again

    def step(self, step: int, asked: StepInputs) -> None:
        adamw.set_rate(self.optimizer, adamw.rate_at(self.config.optimizer, step, self.config.steps))
        # for networks with dropout; torch.manual_seed would note a stack trace for each kind of GPU
        device = self.ranks.device
        dice = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        dice.manual_seed(mixed(self.config.seed, step, self.ranks.rank))
        loss, norm, errors, lam = self.advance(asked)
        if self.ema is not None:
            self.ema.update(self.config.batch)
        self.window.append((loss, norm))
        self.bins.add(BatchLoss(loss, errors, lam))

    def journal(self, first: int) -> Journal | None:
        if not self.ranks.is_first:
            return None
        c = self.config
        return Journal(self.folder, c.log, first=first, steps=c.steps, batch=c.batch, quiet=self.quiet)

    def report(self, step: int, journal: Journal | None) -> None:
        """One line of the log: all ranks' means, and how much the steps of the window differ."""
        losses, norms = (torch.stack(series) for series in zip(*self.window, strict=True))
        losses = self.ranks.mean(losses.double())
        bins = ByLevel()
        bins.sums = self.ranks.mean(self.bins.sums) * self.ranks.world
        self.window, self.bins = [], ByLevel()
        values = {
            "loss": float(losses.mean()),
            "loss_std": float(losses.std(correction=0)),
            "grad_norm": float(norms.double().mean()),
            "grad_norm_std": float(norms.double().std(correction=0)),
            "rate": adamw.rate_at(self.config.optimizer, step - 1, self.config.steps),
            "levels": bins.rows(),
        }
        if journal is not None:
            journal.window(step, values)
        for name in ("loss", "grad_norm"):  # a gradient that is not finite has spoiled the weights already
            if not math.isfinite(values[name]):
                last = self.checkpoints.latest()
                advice = f"Lower optimizer.rate; the last good step is {last or 0}."
                raise PellucidError(rule(f"{name} up to step {step}", "finite", values[name], advice), "loss-nan")

    def draw(self, step: int, journal: Journal | None) -> None:
        images = self.with_means(lambda network: self.task.images(network, self.config.log.pictures, 0))
        if journal is not None and images is not None:
            journal.images(step, images)

    def with_means(self, use: Callable[[nn.Module], Any]) -> Any:
        """On the first rank, calls with the network as it would be shipped: its first running mean, in eval mode."""
        self.network.eval()
        try:
            with self.ema.inside(self.config.ema[0]) if self.ema else nullcontext():
                whole = self.ranks.whole(self.network)
                return use(whole.to(self.ranks.device)) if self.ranks.is_first else None
        finally:
            self.network.train()

    def finish(self) -> None:
        """Saves the trained model next to the checkpoints."""
        self.with_means(lambda network: self.task.save(network, self.folder / MODEL))
        self.ranks.barrier()


def train(
    config: TrainConfig,
    folder: str | Path,
    *,
    device: str | None = None,
    quiet: bool = False,
    until: int | None = None,
    data_changed: bool = False,
) -> TrainingResult:
    """Trains by a config, into a folder; resumes if the folder has its checkpoints."""
    with Ranks.join(config.engine.strategy, device) as ranks:
        return Trainer(config, Path(folder), ranks, quiet=quiet).run(until, data_changed=data_changed)
