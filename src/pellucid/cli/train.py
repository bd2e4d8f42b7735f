"""`pellucid train`: a run from one config file, on one process or under torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, Out

CANCELLED = 130  # what shells expect after Ctrl-C


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file that says all of the run.")],
    out: Out = None,
    device: Device = None,
    until: Annotated[
        int | None, typer.Option(metavar="STEP", min=1, help="Stop after this step; the next call goes on.")
    ] = None,
    data_changed: Annotated[
        bool,
        typer.Option("--data-changed", metavar="", help="Go on although the data are not those of the start."),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", metavar="", help="Do not train: say what each rank holds and what the ranks send."),
    ] = False,
    ranks: Annotated[int | None, typer.Option(metavar="N", min=1, help="With --explain: for so many ranks.")] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the result as JSON.")] = False,
) -> None:
    """Train as a config file says. A run that was stopped goes on from its last checkpoint.

    Example: [bold]pellucid train configs/cifar10.toml --out out/cifar10[/]

    On several GPUs: [bold]torchrun --nproc-per-node 8 -m pellucid.cli train configs/cifar10.toml[/]
    """
    if "RANK" in os.environ:  # DDP warns of an option that we choose, once a rank; torch reads this when it is imported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from pellucid.core.errors import PellucidError
    from pellucid.core.reader import naming
    from pellucid.train.config import TrainConfig, chosen
    from pellucid.train.kinds import DATA, TASKS

    read = TrainConfig.load(config)
    with naming(config.name):  # what they hold is read where they are built
        chosen(read.data, DATA, "data")
        chosen(read.task, TASKS, "task")
    if explain:
        from pellucid.cli import train_explain

        train_explain.show(read, ranks or int(os.environ.get("WORLD_SIZE", "1")), as_json=as_json)
        return
    if ranks is not None:
        raise PellucidError("--ranks must be given with --explain; torchrun says how many ranks train.", "usage")
    folder = out or Path("out") / config.stem
    try:
        from pellucid.train.trainer import train

        done = train(read, folder, device=device, until=until, data_changed=data_changed)
    except KeyboardInterrupt:
        if not int(os.environ.get("RANK", "0")):
            words = {"--out": out, "--device": device, "--until": until, "--json": "" if as_json else None}
            show_stopped(read.steps, folder, config, words)
        raise typer.Exit(CANCELLED) from None
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        found = {"folder": str(done.folder), "steps": done.steps, "seconds": done.seconds, "skipped": done.skipped}
        output.print_json(found)
        return
    left = "" if done.steps == read.steps else f" of {read.steps}"
    bad = f"; {done.skipped} images could not be read and were skipped" if done.skipped else ""
    print(f"{done.steps} steps{left} in {done.seconds:.0f} s → {done.folder}{bad}")


def show_stopped(steps: int, folder: Path, config: Path, words: dict[str, Any]) -> None:
    """After Ctrl-C: what is kept, and the command that goes on."""
    from pellucid.train.checkpoint import Checkpoints

    kept = max(Checkpoints(folder / "checkpoints").steps(), default=0)
    given = [word for name, value in words.items() if value is not None for word in (name, str(value)) if word]
    again = shlex.join(["pellucid", "train", str(config), *given])
    if "RANK" in os.environ:
        again = "the same torchrun command"
    print(f"cancelled: {folder} keeps {kept} of {steps} steps. Go on with: {again}", file=sys.stderr)
