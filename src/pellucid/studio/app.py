"""The page: a model to choose, and a tab for each thing one can see."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import gradio as gr

from pellucid.core.errors import PellucidError, rule
from pellucid.labs.catalog import Lab
from pellucid.studio import html, running
from pellucid.studio.compare_tab import CompareTab
from pellucid.studio.doctor_tab import DoctorTab
from pellucid.studio.generate import Generate
from pellucid.studio.labs_tab import LabsTab
from pellucid.studio.pipeline_tab import PipelineTab
from pellucid.studio.schedules_tab import SchedulesTab
from pellucid.studio.session import Sessions
from pellucid.studio.shelf import Shelf
from pellucid.studio.study_tab import StudyTab
from pellucid.studio.trace_tab import TraceTab

TABS: dict[str, Callable[..., Any]] = {
    "Generate": Generate,
    "Trace": TraceTab,
    "Compare": CompareTab,
    "Schedules": SchedulesTab,
    "Pipeline": PipelineTab,
    "Study": StudyTab,
    "Doctor": DoctorTab,
    "Labs": LabsTab,
}
MOST_BYTES = "32mb"  # of an upload
THREADS = 16


def build(shelf: Shelf, sessions: Sessions, lab: Lab | None = None) -> gr.Blocks:
    """The page; with a lab it opens at Labs, with that one chosen."""
    names = shelf.choices()
    with gr.Blocks(title="Pellucid studio", analytics_enabled=False) as page:
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
                    tab(shelf, sessions, model, ran, **({"chosen": lab} if lab and name == "Labs" else {}))

        def leave(request: gr.Request) -> None:
            sessions.end(request.session_hash)

        page.unload(leave)
    return page


def start(
    shelf: Shelf, sessions: Sessions, *, port: int, open_browser: bool = False, lab: Lab | None = None
) -> gr.Blocks:
    """The page, served on 127.0.0.1 beside this thread; the first model is loaded while people look."""
    page = build(shelf, sessions, lab)
    page.queue(default_concurrency_limit=8, max_size=64)
    try:
        page.launch(
            server_name="127.0.0.1",
            server_port=port or free_port(),
            inbrowser=open_browser,
            prevent_thread_lock=True,
            max_threads=THREADS,
            max_file_size=MOST_BYTES,
            quiet=True,
            footer_links=[],
            css=html.CSS,
            head=html.HEAD,
            theme=gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
            ssr_mode=False,
        )
    except OSError:
        advice = "Another program listens there; --port 0 takes a free one."
        raise PellucidError(rule("port", "a free one", port, advice), "studio-port") from None
    threading.Thread(target=warm, args=(shelf,), daemon=True).start()
    return page


def warm(shelf: Shelf) -> None:
    """Loads what people are likely to ask for first; what cannot be loaded says so when it is asked for."""
    for name in shelf.choices()[:1]:
        with contextlib.suppress(PellucidError, OSError):
            running.Preview(shelf.pipe(name)).warm()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def serve(
    models: Sequence[str], *, port: int, open_browser: bool, device: str | None = None, lab: Lab | None = None
) -> None:
    """Until Ctrl-C."""
    sessions = Sessions()
    page = start(Shelf(models, device), sessions, port=port, open_browser=open_browser, lab=lab)
    print(f"the studio is open at {page.local_url} (Ctrl-C closes it)", flush=True)
    try:
        page.block_thread()
    finally:
        sessions.end_all()
