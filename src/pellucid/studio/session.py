"""One person at the page: a folder for what their runs leave, and the work that they have under way."""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.studio import jobs
from pellucid.studio.jobs import Job, Work

KEPT = 8  # runs of a person whose traces stay


@dataclass
class Session:
    folder: Path
    runs: dict[str, Path] = field(default_factory=dict)  # traces by what they are called, the newest last
    jobs: dict[str, Job] = field(default_factory=dict)  # by the tab that began them
    count: int = 0

    def new_file(self, ending: str) -> Path:
        self.count += 1
        return self.folder / f"{self.count:04d}{ending}"

    def keep(self, name: str, trace: Path) -> None:
        self.runs.pop(name, None)
        self.runs[name] = trace
        while len(self.runs) > KEPT:
            self.runs.pop(next(iter(self.runs))).unlink(missing_ok=True)

    def begin(self, tab: str, work: Work) -> Job:
        """One work a tab: what was under way there is stopped."""
        self.cancel(tab)
        self.jobs[tab] = jobs.begin(work)
        return self.jobs[tab]

    def cancel(self, tab: str) -> bool:
        """Whether there was something to cancel."""
        job = self.jobs.pop(tab, None)
        if job is None or job.ended:
            return False
        job.cancel()
        return True


@dataclass
class Sessions:
    """All that are at the page, by the mark that Gradio gives each browser tab."""

    held: dict[str, Session] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, mark: str | None) -> Session:
        with self.lock:
            if mark not in self.held:
                self.held[mark or ""] = Session(Path(tempfile.mkdtemp(prefix="pellucid-studio-")))
            return self.held[mark or ""]

    def end(self, mark: str | None) -> None:
        """A page was closed: its work stops, and what it left is removed."""
        with self.lock:
            gone = self.held.pop(mark or "", None)
        if gone is not None:
            for tab in list(gone.jobs):
                gone.cancel(tab)
            shutil.rmtree(gone.folder, ignore_errors=True)

    def end_all(self) -> None:
        for mark in list(self.held):
            self.end(mark)
