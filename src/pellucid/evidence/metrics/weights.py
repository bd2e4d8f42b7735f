"""The weights of FID's Inception: from a path, from the cache, or from where everybody has them, checked."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch

from pellucid.core.errors import PellucidError, rule
from pellucid.evidence.metrics.inception import Inception
from pellucid.interop import weights
from pellucid.interop.atomic_files import put

URL = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
NAME = URL.rpartition("/")[2]
CHECKSUM = re.compile(r"-([0-9a-f]{8,64})\.")  # in the name, as torch.hub has it: how its SHA-256 begins
MAX_BYTES = 128 * 2**20  # the file has 96 MB
TIMEOUT = 30.0  # seconds without a byte
PIECE = 2**20
NOT_READ = re.compile(r"^(fc|AuxLogits)\.|\.num_batches_tracked$")  # the classifier, and a count of training


def cache_folder() -> Path:
    """$PELLUCID_CACHE, or ~/.cache/pellucid."""
    given = os.environ.get("PELLUCID_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "pellucid"


def load_inception(
    path: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Inception:
    """The network with the weights of this file (.safetensors or pytorch-fid's .pth), of the cache, or downloaded."""
    place = find(progress) if path is None else Path(path)
    if not place.is_file():
        raise PellucidError(rule("Inception weights", "a file that exists", str(place)), "file")
    tensors = {name: tensor for name, tensor in weights.read(place).items() if not NOT_READ.search(name)}
    return weights.load(Inception, tensors, name=place.name, dtype=torch.float32, device=device)


def find(progress: Callable[[int, int], object] | None = None, url: str = URL) -> Path:
    """The cached file; it is downloaded where there is none."""
    folder = cache_folder()
    for name in ("inception.safetensors", NAME):
        if (folder / name).is_file():
            return folder / name
    return download(url, folder / NAME, progress)


def download(url: str, goal: Path, progress: Callable[[int, int], object] | None = None) -> Path:
    """The file at `url`, whole and with the checksum that its name says, or not at all; at most 128 MiB.

    `progress` is told the bytes that came and those that are expected, 0 where the server does not say.
    """
    if not url.startswith(("https://", "http://")):
        raise PellucidError(rule("address of weights", "one of http or https", url), "weights-address")
    goal.parent.mkdir(parents=True, exist_ok=True)

    def write(part: Path) -> None:
        digest = receive(url, part, progress)
        wanted = CHECKSUM.search(url.rpartition("/")[2])
        if wanted is None or not digest.startswith(wanted[1]):
            must = f"of SHA-256 {wanted[1]}…" if wanted else "named after its SHA-256"
            raise PellucidError(rule(f"download of {goal.name}", must, f"{digest[:8]}…"), "weights-checksum")

    try:
        put(goal, write)
    except (OSError, http.client.HTTPException) as error:
        raise out_of_reach(goal, error) from None
    return goal


def receive(url: str, part: Path, progress: Callable[[int, int], object] | None) -> str:
    """Writes what the server sends into `part`; its SHA-256."""
    digest, came = hashlib.sha256(), 0
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, part.open("wb") as file:
        expected = int(answer.headers.get("Content-Length") or 0)
        while piece := answer.read(PIECE):
            came += len(piece)
            if max(came, expected) > MAX_BYTES:
                must = f"at most {MAX_BYTES} bytes"
                raise PellucidError(rule(f"download of {part.name}", must, max(came, expected)), "weights-size")
            digest.update(piece)
            file.write(piece)
            if progress is not None:
                progress(came, expected)
        if came < expected:  # urllib takes a connection that broke for the end of the file
            raise http.client.IncompleteRead(b"", expected - came)
    return digest.hexdigest()


def out_of_reach(goal: Path, error: Exception) -> PellucidError:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(error, urllib.error.HTTPError):
        cause = f"{error.code} {error.reason}"
        error.close()  # it is the answer, with its connection
    words = (str(cause) or type(cause).__name__).splitlines()[0][:120]
    return PellucidError(
        f"Inception weights must be given as a path, or lie in {goal.parent}, or be within reach; "
        f"the download failed ({words}). Fetch {NAME} elsewhere and name it with --inception.",
        "weights-network",
    )
