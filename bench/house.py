"""The size and shape of the code: files, lines, public names, imports, and what one command runs through.

    python bench/house.py                # the figures of this checkout
    python bench/house.py --root TREE    # of another one
    python bench/house.py --no-run       # without running the three commands

Public names are functions, classes and constants at the top level of a module without a leading underscore. "Used
elsewhere" counts a name that another file of src, tests, bench, docs or recipes imports or reads from the module.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOMS = ("core", "models", "interop", "pipeline", "scenes", "train", "evidence", "labs", "studio", "cli")
COMMANDS = {
    "sample": ["sample", "scenes-128", "a small red star", "--steps", "4", "--seed", "7", "--out", "{out}/star.png"],
    "doctor": ["doctor", "scenes-128", "--quick"],
    "study samplers": [
        "study", "samplers", "--model", "scenes-128", "--samplers", "ddim", "--steps", "2,4", "--prompts", "scenes:2",
        "--converged-steps", "8", "--path-steps", "8", "--rounds", "1", "--out", "{out}/study",
    ],
}  # fmt: skip
# Counts files and functions of src/pellucid that a command calls; what runs while a module is imported does not count.
TRACER = """
import sys, threading
from pathlib import Path
root = str(Path(sys.argv[1]).resolve() / "src/pellucid") + "/"
files, functions = set(), set()
def see(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and (code.co_filename, code.co_qualname) not in functions:
        above = frame
        while above is not None:
            if above.f_code.co_name == "<module>" and above.f_code.co_filename.startswith(root):
                return
            above = above.f_back
        files.add(code.co_filename); functions.add((code.co_filename, code.co_qualname))
sys.argv = ["pellucid", *sys.argv[2:]]
from pellucid.cli import main
sys.setprofile(see); threading.setprofile(see)
try:
    main()
except SystemExit:
    pass
sys.setprofile(None)
print("\\n".join(sorted(files)), file=sys.stderr)
print(f"@@{len(files)} {len(functions)}")
"""


def module_of(path: Path, src: Path) -> str:
    name = ".".join(path.relative_to(src).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports_of(path: Path, name: str, modules: frozenset[str]) -> set[str]:
    """The modules of the package that a file imports, at its top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                found |= {deeper} if deeper in modules else {node.module} & modules
    return found - {name}


def top_names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return {name for name in found if not (name.startswith("__") and name.endswith("__"))}


def used_in(path: Path, modules: frozenset[str]) -> set[tuple[str, str]]:
    """(module, name) pairs that a file imports by name or reads as an attribute of an imported module."""
    tree, pairs, known = ast.parse(path.read_text("utf-8")), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                if deeper in modules:
                    known[alias.asname or alias.name] = deeper
                elif node.module in modules:
                    pairs.add((node.module, alias.name))
        elif isinstance(node, ast.Import):
            known |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in modules}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whole = ast.unparse(node.value)
            module = known.get(whole, whole)
            if module in modules:
                pairs.add((module, node.attr))
    return pairs


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """The longest path of imports; what lies on a cycle is counted once."""
    on_path: set[str] = set()

    @cache
    def below(name: str) -> tuple[str, ...]:
        on_path.add(name)
        best = max((below(other) for other in sorted(graph[name]) if other not in on_path), key=len, default=())
        on_path.discard(name)
        return (name, *best)

    sys.setrecursionlimit(10_000)
    return list(max((below(name) for name in graph), key=len))


def measure(root: Path, run: bool) -> dict[str, object]:
    src = root / "src"
    files = sorted(path for path in (src / "pellucid").rglob("*.py"))
    modules = {module_of(path, src): path for path in files}
    names = frozenset(modules)
    graph = {name: imports_of(path, name, names) for name, path in modules.items()}
    importers = {name: [other for other in graph if name in graph[other]] for name in graph}
    tops = {name: top_names(path) for name, path in modules.items() if ".labs." not in name}
    public = {(module, name) for module, held in tops.items() for name in held if not name.startswith("_")}
    others = [p for room in ("tests", "bench", "docs", "recipes") for p in (root / room).rglob("*.py")]
    pairs = {pair for path in files for pair in used_in(path, names) if pair[0] != module_of(path, src)}
    outside = pairs | {pair for path in others for pair in used_in(path, names)}
    found: dict[str, object] = {
        "files": len(files),
        "lines": sum(path.read_text("utf-8").count("\n") for path in files),
        "files with one importer": sum(len(held) == 1 for held in importers.values()),
        "public top-level names": len(public),
        "private top-level names": sum(name.startswith("_") for held in tops.values() for name in held),
        "public names used in no other file of src": len(public - pairs),
        "public names used in no other file at all": len(public - outside),
        "longest import chain": len(longest_chain(graph)),
        "test files": sum(1 for p in (root / "tests").rglob("*.py")),
        "test lines": sum(p.read_text("utf-8").count("\n") for p in (root / "tests").rglob("*.py")),
    }
    for room in ROOMS:
        held = [path for path in files if path.relative_to(src / "pellucid").parts[0] == room]
        found[f"{room}: files, lines"] = f"{len(held)}, {sum(path.read_text('utf-8').count(chr(10)) for path in held)}"
    for name, words in COMMANDS.items() if run else ():
        with tempfile.TemporaryDirectory() as out:
            env = os.environ | {"PYTHONPATH": str(src), "OMP_NUM_THREADS": "1"}
            given = [word.format(out=out) for word in words]
            done = subprocess.run(
                [sys.executable, "-c", TRACER, str(root), *given], env=env, capture_output=True, text=True
            )
            if "@@" not in done.stdout:
                raise SystemExit(done.stderr[-2000:])
            count, functions = done.stdout.rsplit("@@", 1)[1].split()
            found[f"{name}: files, functions run"] = f"{count}, {functions}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--no-run", action="store_true", help="leave out the commands")
    given = parser.parse_args()
    for name, value in measure(given.root.resolve(), not given.no_run).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
