"""The page: a model to choose, and its tabs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from pellucid.core.errors import PellucidError
from pellucid.interop.source import locate
from pellucid.labs.catalog import LABS, Lab
from pellucid.studio import generate_tab, html, scratch, server
from pellucid.studio.compare_tab import CompareTab
from pellucid.studio.doctor_tab import DoctorTab
from pellucid.studio.form import Shelf, named
from pellucid.studio.generate_tab import GenerateTab
from pellucid.studio.labs_tab import LabsTab
from pellucid.studio.pipeline_tab import PipelineTab
from pellucid.studio.schedules_tab import SchedulesTab
from pellucid.studio.server import Studio, is_loopback
from pellucid.studio.study_tab import StudyTab
from pellucid.studio.trace_tab import TraceTab
from pellucid.studio.visitors import Sessions, files

TABS: dict[str, Callable[..., Any]] = {
    "Generate": GenerateTab,
    "Trace": TraceTab,
    "Compare": CompareTab,
    "Schedules": SchedulesTab,
    "Pipeline": PipelineTab,
    "Study": StudyTab,
    "Doctor": DoctorTab,
    "Labs": LabsTab,
}
_MOST_BYTES = "32mb"  # of an upload
_THREADS = 16


class _Page(gr.Blocks):
    """Blocks that remember which session each file belongs to."""

    sessions: Sessions

    async def process_api(self, *given: Any, **named: Any) -> dict[str, Any]:
        self.sessions.note(named.get("session_hash"), named.get("inputs"))  # first: the event may fail
        made: dict[str, Any] = await super().process_api(*given, **named)
        self.sessions.note(named.get("session_hash"), made.get("data"))
        return made


def _build(shelf: Shelf, sessions: Sessions, lab: Lab | None = None, *, checks: bool = True) -> _Page:
    """The page; with a lab it opens at Labs, with that one chosen. Without `checks` no answer to a lab is run."""
    names = shelf.choices()
    with _Page(title="Pellucid studio", analytics_enabled=False) as page:
        page.sessions = sessions
        gr.Markdown("# Pellucid\nEvery number between noise and image, in the open.")
        model = gr.Dropdown(
            names,
            value=names[0] if names else None,
            label="Model",
            info="a bundle, a folder, a .safetensors file or a hub id",
            allow_custom_value=True,
            elem_id="model",
        )
        ran = gr.State("")  # the name of the last run of this page
        with gr.Tabs(selected="Generate" if lab is None else "Labs"):
            for name, tab in TABS.items():
                with gr.Tab(name, id=name):
                    options = {"chosen": lab or LABS[0], "checks": checks} if name == "Labs" else {}
                    tab(shelf, sessions, model, ran, **options)
    return page


def start(shelf: Shelf, sessions: Sessions, *, port: int, host: str = "127.0.0.1", lab: Lab | None = None) -> Studio:
    """Serves the page in another thread; the first model is loaded in the background."""
    page = _build(shelf, sessions, lab, checks=is_loopback(host))
    sessions.stay = frozenset(files())
    page.max_threads = _THREADS
    page.queue(default_concurrency_limit=8, max_size=64)
    studio = server.start(
        page,
        sessions,
        host=host,
        port=port,
        max_file_size=_MOST_BYTES,
        css=html.CSS,
        head=html.HEAD,
        theme=gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
    )
    threading.Thread(target=_warm, args=(shelf,), daemon=True).start()
    return studio


def _warm(shelf: Shelf) -> None:
    """Loads the model that is probably used first; if it cannot be loaded, its first use reports why."""
    for name in shelf.choices()[:1]:
        with contextlib.suppress(PellucidError, OSError):
            generate_tab.Preview(shelf.pipe(name)).warm()


def serve(
    models: Sequence[str], *, port: int, open_browser: bool, device: str | None = None, lab: Lab | None = None
) -> None:
    """Runs until Ctrl-C or a signal ends the process, and removes what it left."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    for name in models:
        locate(named(name))
    sessions, studio, code = Sessions(), None, 0
    try:
        studio = start(Shelf(models, device), sessions, port=port, lab=lab)
        print(f"the studio is open at {studio.address} (Ctrl-C closes it)", flush=True)
        if open_browser:
            studio.open_browser()
        studio.wait()
    except KeyboardInterrupt:
        print()
    except SystemExit as ending:
        code = int(ending.code or 0)
    finally:
        if studio is not None:
            studio.close()  # so that no page opens after it
        sessions.end_all()
        scratch.remove()
    sys.stdout.flush()
    os._exit(code)  # torch aborts where the interpreter ends amid a load or a step of another thread
