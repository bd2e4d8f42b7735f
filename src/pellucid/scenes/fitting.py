"""Which shape a mask is, and the colour and texture of the thing. Hidden parts are ignored."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.scenes import painting, shapes
from pellucid.scenes.labels import COLOURS, SIDE, Labels, away
from pellucid.scenes.painting import OUTLINE, lightness, period
from pellucid.scenes.words import SHAPE_NAMES, TEXTURE_NAMES

# --- Shapes ---------------------------------------------------------------------------------------------------------

_GRID = 56  # points along the side of a thing's window
_KEPT = 4  # shapes that are refined
_ROUNDS = 5
_SOFT = 3 / SIDE  # the width of a border's ramp: that of the mask
_CLEAR = 0.945  # a fit that needs no explanation by something in front
_MOST_HIDDEN, _LEAST_BORDER = 0.5, 0.55
_TIPS = {"star": 0.035, "crescent": 0.02}  # what a blurred image loses of their overlap
_GAIN = 0.045  # what such an explanation must be better by


@dataclass(frozen=True)
class Window:
    """M things, each in its own window: coordinates, its mask, and where it can be seen."""

    row: Tensor  # (M,) int64: its image
    thing: Tensor  # (M,) int64: its number in labels
    x: Tensor  # (M, G) shares of the side
    y: Tensor  # (M, G)
    mask: Tensor  # (M, G, G) float: its own pixels
    seen: Tensor  # (M, G, G) float: 0 where another thing may hide it
    filled: Tensor  # (M, G, G) float: its mask with what hides it inside its box

    def __len__(self) -> int:
        return len(self.row)

    @property
    def colour(self) -> Tensor:
        """(M,) int64"""
        return self.thing % COLOURS


@dataclass(frozen=True)
class Fit:
    """The best shape of M things, how well it fits (overlap over union), and how well the next one."""

    shape: Tensor  # (M,) int64
    x: Tensor  # (M,)
    y: Tensor  # (M,)
    radius: Tensor  # (M,)
    overlap: Tensor  # (M,)
    second: Tensor  # (M,)
    hidden: Tensor  # (M,): the share of the shape that cannot be seen
    border: Tensor  # (M,): the share of its outline that can


def windows(labels: Labels) -> Window:
    """A window about each thing. Its mask has a ramp of three pixels, as the shapes that are laid over it have."""
    row, thing = labels.present.nonzero(as_tuple=True)
    mask = labels.label[row] == thing[:, None, None] + 1  # (M, H, W)
    other = (labels.label[row] > 0) & ~mask
    left, right = _limits(mask.any(1))
    top, foot = _limits(mask.any(2))
    x, y = _axis(left, right), _axis(top, foot)
    inside = _between(x, left, right)[:, None, :] & _between(y, top, foot)[:, :, None]
    parts = torch.stack([_blurred(mask), _blurred(other), other.float()], 1)  # (M, 3, H, W)
    own, beside, hiding = _at(parts, x, y).unbind(1)
    filled = torch.maximum(own, ((hiding > 0.5) & inside).float())
    return Window(row, thing, x, y, own, (beside < 0.05).float(), filled)


def _blurred(mask: Tensor) -> Tensor:
    return F.avg_pool2d(mask[:, None].float(), 3, 1, 1, count_include_pad=False)[:, 0]


def _at(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(M, C, G, G): values (M, C, H, W) at points, bilinear; nothing outside of the image."""
    wide = (len(x), x.shape[1], x.shape[1])
    grid = torch.stack([x[:, None, :].expand(wide), y[:, :, None].expand(wide)], -1) * 2 - 1
    return F.grid_sample(values, grid, align_corners=False)


def _between(v: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return (v >= low[:, None]) & (v <= high[:, None])


def _limits(any_: Tensor) -> tuple[Tensor, Tensor]:
    """First and last of what is true along a row (M, S), as shares of the side."""
    numbers = torch.arange(SIDE, device=any_.device)
    low = torch.where(any_, numbers, SIDE).amin(1).clamp(max=SIDE - 1)
    high = torch.where(any_, numbers, -1).amax(1).clamp(min=0)
    return low / SIDE, (high + 1) / SIDE


def _axis(low: Tensor, high: Tensor) -> Tensor:
    """(M, G): a box and a little about it."""
    wide = (high - low) * 0.12 + 3 / SIDE
    steps = (torch.arange(_GRID, device=low.device) + 0.5) / _GRID
    return (low - wide)[:, None] + steps * (high - low + 2 * wide)[:, None]


@lru_cache(maxsize=8)
def _moments(device: torch.device) -> tuple[Tensor, Tensor]:
    """Area (10,) and middle of mass (10, 2) of each shape at radius one."""
    steps = (torch.arange(300) + 0.5) / 100 - 1.5
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    many = torch.arange(len(SHAPE_NAMES))
    inside = (shapes.distance(many, x.expand(10, -1, -1).contiguous(), y.expand(10, -1, -1).contiguous()) < 0).float()
    total = inside.sum((1, 2))
    middle = torch.stack([(inside * v).sum((1, 2)) / total for v in (x, y)], -1)
    return (total * 1e-4).to(device), middle.to(device)


def distances(window: Window, which: Tensor, shape: Tensor, place: Tensor) -> Tensor:
    """(K, G, G): of hypotheses (shape, (x, y, radius)) about things `which`, in shares of the side."""
    x, y, radius = place[:, :, None, None].unbind(1)
    wide = (len(which), _GRID, _GRID)
    dx = (window.x[which][:, None, :] - x).expand(wide)
    dy = (window.y[which][:, :, None] - y).expand(wide)
    return shapes.distance(shape, dx / radius, dy / radius) * radius


def _agreement(window: Window, which: Tensor, distance: Tensor) -> Tensor:
    """(K,): what mask and shape share over what they cover together, where the thing can be seen."""
    cover = (0.5 - distance / _SOFT).clamp(0, 1)
    mask, seen = window.mask[which], window.seen[which]
    both = (torch.minimum(cover, mask) * seen).sum((1, 2))
    either = (torch.maximum(cover, mask) * seen).sum((1, 2))
    return both / either.clamp(min=1e-6)


def _unseen_hole(window: Window, which: Tensor, shape: Tensor, place: Tensor) -> Tensor:
    """(K,): 1 for a ring whose hole is hidden: a disc is the simpler explanation."""
    dx = (window.x[which] - place[:, :1])[:, None, :] / place[:, 2, None, None]
    dy = (window.y[which] - place[:, 1:2])[:, :, None] / place[:, 2, None, None]
    hole = (dx.square() + dy.square() < shapes.RING_IN**2 / 2).float()
    seen = (hole * window.seen[which]).sum((1, 2)) / hole.sum((1, 2)).clamp(min=1)
    return ((shape == SHAPE_NAMES.index("ring")) & (seen < 0.5)).float()


def _first_guess(window: Window) -> Tensor:
    """(M, 10, 3): the place of each shape with the mask's area and middle of mass."""
    cell = (window.x[:, 1] - window.x[:, 0]) * (window.y[:, 1] - window.y[:, 0])
    total = window.filled.sum((1, 2)).clamp(min=1)
    x = (window.filled.sum(1) * window.x).sum(1) / total
    y = (window.filled.sum(2) * window.y).sum(1) / total
    area, middle = _moments(window.x.device)
    radius = (total * cell)[:, None].div(area).sqrt()  # (M, 10)
    return torch.stack([x[:, None] - radius * middle[:, 0], y[:, None] - radius * middle[:, 1], radius], -1)


def _refined(window: Window, which: Tensor, shape: Tensor, place: Tensor) -> Tensor:
    """Gauss-Newton on the border: residual = cover − mask; the slope of a distance gives all three derivatives."""
    step_x = (window.x[which, 1] - window.x[which, 0])[:, None, None]
    step_y = (window.y[which, 1] - window.y[which, 0])[:, None, None]
    mask, seen = window.mask[which], window.seen[which]
    for _ in range(_ROUNDS):
        distance = distances(window, which, shape, place)
        slope_y, slope_x = torch.gradient(distance, dim=(1, 2))
        slope_x, slope_y = slope_x / step_x, slope_y / step_y
        dx = window.x[which][:, None, :] - place[:, 0, None, None]
        dy = window.y[which][:, :, None] - place[:, 1, None, None]
        grow = (distance - dx * slope_x - dy * slope_y) / place[:, 2, None, None]
        soft = 0.5 - distance / _SOFT
        live = ((soft > 0) & (soft < 1)).float() * seen
        slopes = torch.stack([slope_x, slope_y, -grow], 1).flatten(2) / _SOFT * live.flatten(1)[:, None]  # (K, 3, G²)
        residual = (soft.clamp(0, 1) - mask).flatten(1) * seen.flatten(1)
        normal = slopes @ slopes.transpose(1, 2)
        normal = normal + 1e-3 * normal.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(3).to(normal)
        normal = normal + 1e-9 * torch.eye(3).to(normal)
        move = torch.linalg.solve(normal, -(slopes @ residual[..., None]))[..., 0]
        place = place + move.clamp(-0.03, 0.03)
        place = torch.cat([place[:, :2], place[:, 2:].clamp(0.02, 0.6)], 1)
    return place


def fit(window: Window) -> Fit:
    """The best shape of each thing: first as if nothing stood before it, and where that fails, as if something did."""
    whole = _best_of(replace(window, seen=torch.ones_like(window.seen), filled=window.mask))
    doubtful = (whole.overlap < _CLEAR).nonzero()[:, 0]
    if not len(doubtful):
        return whole
    part = _best_of(Window(*(getattr(window, field.name)[doubtful] for field in fields(window))))
    better = (
        (part.overlap > whole.overlap[doubtful] + _GAIN) & (part.hidden < _MOST_HIDDEN) & (part.border > _LEAST_BORDER)
    )
    rows = doubtful[better]

    def merged(name: str) -> Tensor:
        values = getattr(whole, name).clone()
        values[rows] = getattr(part, name)[better]
        return values

    return Fit(*(merged(field.name) for field in fields(Fit)))


def _best_of(window: Window) -> Fit:
    """The best shape of each thing, where it can be seen."""
    count, many = len(window), len(SHAPE_NAMES)
    device = window.x.device
    guess = _first_guess(window)  # (M, 10, 3)
    which = torch.arange(count, device=device).repeat_interleave(many)
    shape = torch.arange(many, device=device).repeat(count)
    rough = _agreement(window, which, distances(window, which, shape, guess.flatten(0, 1))).reshape(count, many)
    kept = rough.topk(_KEPT, dim=1).indices  # (M, K)
    which = torch.arange(count, device=device).repeat_interleave(_KEPT)
    shape = kept.flatten()
    place = _refined(window, which, shape, guess.gather(1, kept[..., None].expand(-1, -1, 3)).flatten(0, 1))
    distance = distances(window, which, shape, place)
    score = _agreement(window, which, distance) - 0.1 * _unseen_hole(window, which, shape, place)
    bonus = torch.tensor([_TIPS.get(name, 0.0) for name in SHAPE_NAMES], device=device)[shape]
    top = (score + bonus).reshape(count, _KEPT).topk(2, dim=1)
    chosen = torch.arange(count, device=device) * _KEPT + top.indices[:, 0]
    cover = (distance[chosen] < 0).float()
    hidden = (cover * (1 - window.seen)).sum((1, 2)) / cover.sum((1, 2)).clamp(min=1)
    line = (distance[chosen].abs() < _SOFT / 2).float()
    border = (line * window.seen).sum((1, 2)) / line.sum((1, 2)).clamp(min=1)
    lead = top.values[:, 0] - top.values[:, 1]
    x, y, radius = place[chosen].unbind(1)
    return Fit(shape[chosen], x, y, radius, score[chosen], score[chosen] - lead, hidden, border)


# --- Colours and textures -------------------------------------------------------------------------------------------

_INSET = OUTLINE + 0.6 / SIDE  # a texture is judged within the rim, or the outline of that style
_GOOD = 0.045  # the mean square error of a texture that needs no search
_POOR = 0.13  # and of one that cannot be read
_LEAD = 0.006  # how much better it must be than the next
_OFF = 0.20  # the farthest that a thing's own tone may lie from its colour's
_FEW = 12  # points within the rim, at least
_SHIFTS = 5  # along each axis, when a pattern does not sit where it should


def _sampled(labels: Labels, window: Window) -> Tensor:
    """(M, 3, G, G): the image in each thing's window."""
    return _at(labels.image[window.row], window.x, window.y)


def _inner(window: Window, fitted: Fit) -> Tensor:
    """(M, G, G) bool: what lies within the rim and is the thing's own."""
    which = torch.arange(len(window), device=window.x.device)
    place = torch.stack([fitted.x, fitted.y, fitted.radius], 1)
    return (distances(window, which, fitted.shape, place) < -_INSET) & (window.mask > 0.5)


def colours(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(M,) int64: the colour that a thing's pixels are nearest to, −1 where none is near."""
    within = (window.mask > 0.7).float().flatten(1)  # (M, G²)
    pixels = _sampled(labels, window).flatten(2).transpose(1, 2)  # (M, G², 3)
    every = painting.objects(pixels.device)
    ends = (painting.tints(pixels.device), painting.shade_of(every))
    off = [away(pixels.reshape(-1, 3), every, end) for end in ends]
    nearest = torch.minimum(*off).reshape(len(window), -1, len(every))
    mean = (nearest * within[..., None]).sum(1) / within.sum(1, keepdim=True).clamp(min=1)
    near = mean.gather(1, window.colour[:, None])[:, 0]
    return torch.where(near <= _OFF, window.colour, -1)


def way_to(tones: Tensor, labels: Labels, window: Window) -> Tensor:
    """(M, G, G): how far each pixel has gone from the thing's colour, 0, to that colour's tone (10, 3), 1."""
    colour = painting.objects(window.x.device)[window.colour]  # (M, 3)
    way = tones[window.colour] - colour
    share = torch.einsum("mchw,mc->mhw", _sampled(labels, window) - colour[:, :, None, None], way)
    return share / way.square().sum(1)[:, None, None]


@lru_cache(maxsize=8)
def _hypotheses(device: torch.device) -> tuple[Tensor, Tensor]:
    """Textures (T,) and shifts in periods (T, 2): each in its place first, then the patterns all about."""
    steps = (torch.arange(_SHIFTS) / _SHIFTS).tolist()
    rows = [(i, 0.0, 0.0) for i in range(len(TEXTURE_NAMES))]
    for name in ("striped", "checkered", "dotted"):
        i = TEXTURE_NAMES.index(name)
        downs = [0.0] if name == "striped" else steps
        rows += [(i, a, b) for a in steps for b in downs if a or b]
    table = torch.tensor(rows, device=device)
    return table[:, 0].long(), table[:, 1:]


def textures(labels: Labels, window: Window, fitted: Fit) -> Tensor:
    """(M,) int64: the texture that explains a thing's tones best, −1 where none does."""
    share = way_to(painting.tints(window.x.device), labels, window).clamp(-0.3, 1.3)
    within = _inner(window, fitted).float()
    near = len(TEXTURE_NAMES)
    first = _errors(window, fitted, share, within, slice(0, near))  # (M, 5)
    lowest, found = first.topk(2, dim=1, largest=False)
    best, second, found = lowest[:, 0], lowest[:, 1], found[:, 0]
    rows = ((best > _GOOD) | (second - best < _LEAD)).nonzero()[:, 0]
    if len(rows):
        some = Window(*(getattr(window, name)[rows] for name in window.__dataclass_fields__))
        part = Fit(*(getattr(fitted, name)[rows] for name in fitted.__dataclass_fields__))
        every = torch.cat([first[rows], _errors(some, part, share[rows], within[rows], slice(near, None))], 1)
        kinds = _hypotheses(share.device)[0]
        own = torch.stack([every[:, kinds == i].amin(1) for i in range(near)], 1)
        lowest, which = own.topk(2, dim=1, largest=False)
        best[rows], second[rows], found[rows] = lowest[:, 0], lowest[:, 1], which[:, 0]
    clear = (best < _POOR) & (second - best >= _LEAD) & (within.sum((1, 2)) >= _FEW)
    return torch.where(clear, found, -1)


def _errors(window: Window, fitted: Fit, share: Tensor, within: Tensor, part: slice) -> Tensor:
    """(M, T): the mean square error of each hypothesis within the rim."""
    kinds, shifts = (v[part] for v in _hypotheses(share.device))
    count, many = len(window), len(kinds)
    which = torch.arange(count, device=share.device).repeat_interleave(many)
    step = period(fitted.radius)[which]
    shift = shifts.repeat(count, 1) * step[:, None]
    wide = (count * many, _GRID, _GRID)
    x = (window.x[which] - fitted.x[which, None] - shift[:, :1])[:, None, :].expand(wide)
    y = (window.y[which] - fitted.y[which, None] - shift[:, 1:])[:, :, None].expand(wide)
    made = lightness(kinds.repeat(count), x, y, fitted.radius[which], 1.5 / SIDE).reshape(count, many, _GRID, _GRID)
    off = (made - share[:, None]).square() * within[:, None]
    return off.sum((2, 3)) / within.sum((1, 2)).clamp(min=1)[:, None]
