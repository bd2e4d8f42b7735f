"""`pellucid train`: a run from one config file, on one process or under torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli import output
from pellucid.cli.options import Device, Out


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file that says all of the run.")],
    out: Out = None,
    device: Device = None,
    until: Annotated[
        int | None, typer.Option(metavar="STEP", min=1, help="Stop after this step; the next call goes on.")
    ] = None,
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
    from pellucid.train.config import TrainConfig

    read = TrainConfig.load(config)
    if explain:
        from pellucid.cli import train_explain

        train_explain.show(read, ranks or int(os.environ.get("WORLD_SIZE", "1")), as_json=as_json)
        return
    if ranks is not None:
        raise PellucidError("--ranks must be given with --explain; torchrun says how many ranks train.", "usage")
    from pellucid.train.trainer import train

    done = train(read, out or Path("out") / config.stem, device=device, until=until)
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        found = {"folder": str(done.folder), "steps": done.steps, "seconds": done.seconds, "skipped": done.skipped}
        output.print_json(found)
        return
    left = "" if done.steps == read.steps else f" of {read.steps}"
    bad = f"; {done.skipped} pictures could not be read and were skipped" if done.skipped else ""
    print(f"{done.steps} steps{left} in {done.seconds:.0f} s → {done.folder}{bad}")
