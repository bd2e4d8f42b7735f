"""The look of a report's page, and the little script that answers the pointer. Nothing is fetched from anywhere."""

from __future__ import annotations

CHART_STYLE = """
.chart { position: relative; min-width: 0; } .chart svg { width: 100%; height: auto; overflow: visible; }
.chart text { font: 12px system-ui, sans-serif; fill: #51606f; }
.chart .name { fill: #1c2530; paint-order: stroke; stroke: #fff; stroke-width: 3px; }
.chart circle { cursor: default; } .chart circle[data-cell] { cursor: pointer; }
.chart circle:focus { outline: none; stroke: #1c2530; stroke-width: 2.5; }
.chart circle.near { stroke: #1c2530; stroke-width: 2.5; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem .9rem; font-size: .85rem; }
.legend button { all: unset; cursor: pointer; } .legend button:focus-visible { outline: 2px solid #1f6fd6; }
.legend button[aria-pressed=false] { opacity: .35; text-decoration: line-through; }
.legend i { display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .35em; }
.tip { position: absolute; pointer-events: none; background: #1c2530; color: #fff; font-size: .8rem; z-index: 3;
  padding: .35rem .55rem; border-radius: 4px; white-space: pre-wrap; max-width: 95%; line-height: 1.35;
  visibility: hidden; }
"""
STYLE = (
    CHART_STYLE
    + """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2530; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; overflow-wrap: anywhere; } p { overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; margin: .2rem 0; }
table { border-collapse: collapse; display: block; overflow-x: auto; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #e3e8ee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.note, figcaption { color: #51606f; font-size: .88rem; }
pre { background: #f5f7f9; padding: 1rem; overflow-x: auto; font-size: .85rem; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 0 1.5rem; }
.cells { display: flex; flex-wrap: wrap; gap: .35rem; margin: .5rem 0; }
.cells button { font: inherit; font-size: .82rem; padding: .1rem .5rem; border: 1px solid #c9d1da; border-radius: 3px;
  background: #fff; cursor: pointer; }
.cells button[aria-pressed=true] { background: #1c2530; color: #fff; }
.shown { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
.shown figure { flex: 1 1 min(420px, 100%); margin: 0; } .scripted .shown figure[hidden] { display: none; }
.shown img { image-rendering: auto; width: 100%; }
"""
)

# Makes one chart answer; a click, or Enter, on a point shows the images of its cell, where the page has them.
CHART_SCRIPT = """
function enliven(chart) {
  const svg = chart.querySelector("svg"), tip = chart.querySelector(".tip");
  const points = [...svg.querySelectorAll("circle[data-tip]")];
  let near = null;
  function point(to) {
    if (near) near.classList.remove("near");
    near = to;
    tip.style.visibility = to ? "visible" : "hidden";
    if (!to) { tip.textContent = ""; tip.style.left = 0; return; }
    to.classList.add("near");
    tip.style.left = 0;
    tip.textContent = to.dataset.tip;
    const spot = to.getBoundingClientRect(), frame = chart.getBoundingClientRect();
    const x = spot.left - frame.left + spot.width / 2, y = spot.top - frame.top;
    const left = Math.min(Math.max(0, x + 12), Math.max(0, frame.width - tip.offsetWidth));
    tip.style.left = left + "px";
    tip.style.top = (y > tip.offsetHeight + 10 ? y - tip.offsetHeight - 8 : y + 18) + "px";
  }
  svg.addEventListener("pointermove", event => {
    let best = null, least = 40;
    for (const p of points) {
      if (p.closest("g").style.display === "none") continue;
      const box = p.getBoundingClientRect();
      const far = Math.hypot(box.left + box.width / 2 - event.clientX, box.top + box.height / 2 - event.clientY);
      if (far < least) { least = far; best = p; }
    }
    point(best);
  });
  svg.addEventListener("pointerleave", () => point(null));
  svg.addEventListener("click", () => { if (near && near.dataset.cell && window.show) show(near.dataset.cell, true); });
  for (const p of points) {
    p.addEventListener("focus", () => point(p));
    p.addEventListener("keydown", event => {
      if (event.key === "Enter" && p.dataset.cell && window.show) show(p.dataset.cell, true);
    });
  }
  chart.querySelectorAll(".legend button").forEach(button => button.addEventListener("click", () => {
    const group = svg.querySelector(`g[data-series="${button.dataset.series}"]`);
    const off = group.style.display !== "none";
    group.style.display = off ? "none" : "";
    button.setAttribute("aria-pressed", !off);
  }));
}
"""

# Images by cell: what is asked for comes beside what was shown before.
SCRIPT = """
document.documentElement.classList.add("scripted");
const shownAtOnce = 2;
function show(key, scroll) {
  for (const block of document.querySelectorAll(".pictures")) {
    const figure = [...block.querySelectorAll("figure")].find(f => f.dataset.cell === key);
    if (!figure) continue;
    const kept = (block.dataset.kept || "").split("\\n").filter(k => k && k !== key);
    kept.push(key);
    while (kept.length > shownAtOnce) kept.shift();
    block.dataset.kept = kept.join("\\n");
    for (const f of block.querySelectorAll("figure")) {
      f.hidden = !kept.includes(f.dataset.cell);
      f.style.order = kept.indexOf(f.dataset.cell);
    }
    for (const b of block.querySelectorAll("button")) b.setAttribute("aria-pressed", kept.includes(b.dataset.cell));
    if (scroll) block.scrollIntoView({behavior: "smooth", block: "start"});
  }
}
for (const block of document.querySelectorAll(".pictures")) {
  block.querySelectorAll("figure").forEach(f => { f.hidden = true; });
  block.querySelectorAll("button").forEach(b => b.addEventListener("click", () => show(b.dataset.cell, false)));
  block.dataset.first.split("\\n").filter(Boolean).forEach(key => show(key, false));
}
"""
SCRIPT += CHART_SCRIPT + 'document.querySelectorAll(".chart").forEach(enliven);\n'
