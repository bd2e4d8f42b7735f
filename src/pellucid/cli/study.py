"""`pellucid study`: the same question asked of many set-ups."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli import adherence, output, study_guidance, study_interaction, study_oracle, study_samplers
from pellucid.cli.options import Device, Out, group

app = group("Compare set-ups, with evidence.")


@app.command("schedules")
def schedules(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file: the run, the schedules, the points.")],
    out: Out = None,
    device: Device = None,
    shard: Annotated[
        str | None, typer.Option(metavar="I/N", help="Only this share of the runs: 0/3 is the first of three.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the table as JSON.")] = False,
) -> None:
    """Train one network under several noise schedules, score it on the way, and draw the report.

    A study that was stopped goes on where it was. Processes that share it (--shard) write into one folder.

    Example: [bold]pellucid study schedules configs/cifar10_schedules_smoke.toml[/]
    """
    from pellucid.evidence.study import charts, schedules_report
    from pellucid.evidence.study.records import shard_of
    from pellucid.evidence.study.schedules import ScheduleStudy, Study

    if shard is None:
        charts.require()
    folder, share = out or Path("out") / config.stem, (0, 1) if shard is None else shard_of(shard)
    study = Study(
        ScheduleStudy.load(config), folder, share, device=device, say=lambda text: print(text, file=sys.stderr)
    )
    study.run()
    if shard is not None:
        if as_json:
            output.print_json({"shard": share[0], "of": share[1], "folder": str(folder)})
        else:
            print(f"shard {shard}: done → {folder}. When all are done, run the same without --shard.")
        return
    report = schedules_report.write(folder)
    print((folder / schedules_report.TABLE).read_text("utf-8") if as_json else report)


app.command("adherence")(adherence.command)
app.command("guidance")(study_guidance.command)
app.command("oracle")(study_oracle.command)
app.command("samplers")(study_samplers.command)
app.command("interaction")(study_interaction.command)
