"""A robust fit of the loss against steps, while training continues.

Losses arrive as floats, many at a time: they gather on the device and are handed over now and then, so that no step
waits for one. Bins of equal width in the logarithm of the step, each a winsorised mean; then a shifted power ``L + A (k
+ d + 1)^-a`` by a grid over ``a`` and ``d``, and at each point a non-negative least-squares fit of ``L`` and ``A``,
re-weighted after Huber. No starting point is needed, and spikes do no harm. Needs NumPy (extra ``checkpoint``), which
is imported when the first fit is made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shared_core.checkpoint.policy import Exponential

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

#: If more values are kept than this, neighbours are merged.
KEPT = 8192
BINS, FEWEST_BINS, FEWEST_IN_BIN, FIRST_STEP = 48, 8, 3, 10
#: Grid of the power and number of shifts; a power at either end means that the form does not fit.
POWERS = tuple(round(0.1 + 0.05 * i, 2) for i in range(59))
SHIFTS = 9
#: Huber's constant, and rounds of re-weighting.
HUBER, ROUNDS = 1.345, 4
#: Drift: residuals are counted beyond half a standard deviation, none for more than four; at 20 the curve has changed.
SLACK, CLIP, ALARM = 0.5, 4.0, 20.0
MISSING = "fitting the loss needs NumPy: pip install 'swift-recovery[all]'"


@dataclass(frozen=True)
class Curve:
    """``floor + scale (k + 1)^-power`` with ``k`` in steps since ``start - shift``; a :class:`LossCurve`. ``floor`` is
    the limit of the loss, ``scale`` its height above that at ``k = 0``, ``start`` the step at which this piece begins.
    """

    floor: float
    scale: float
    power: float
    shift: float = 0.0
    start: float = 0.0

    def loss(self, step: float) -> float:
        return float(self.floor + self.scale * (max(step - self.start, 0.0) + self.shift + 1) ** -self.power)

    def slope(self, step: float) -> float:
        """Derivative of the loss, per step."""
        base = max(step - self.start, 0.0) + self.shift + 1
        return float(-self.power * self.scale * base ** (-self.power - 1))


@dataclass(frozen=True)
class Fit:
    """What a fit found.

    Attributes:
        curve: of the present piece; a typical one while there are too few losses; None if the losses do not follow one.
        exponential: COCI's form, for comparison.
        why: why the curve is not a fitted one; empty if it is.
    """

    curve: Curve | None = None
    exponential: Exponential | None = None
    why: str = ""
    deviation: float = 0.0


class CurveFitter:
    """Takes losses, and fits when asked. ``restarts``: where and why earlier pieces ended."""

    def __init__(self) -> None:
        self.start = 0
        self.restarts: list[tuple[int, str]] = []
        self._steps: list[float] = []
        self._losses: list[float] = []
        self._open: list[tuple[float, float]] = []
        self._stride = 1
        self._checked = 0
        self._found: Fit | None = None

    def feed(self, steps: Sequence[int], losses: Sequence[float]) -> None:
        """Take losses of ascending steps; those that are not finite are left out."""
        for step, loss in zip(steps, losses, strict=True):
            if step >= self.start and math.isfinite(loss):
                self._open.append((step, loss))
                if len(self._open) >= self._stride:
                    self._steps.append(sum(each[0] for each in self._open) / len(self._open))
                    self._losses.append(sum(each[1] for each in self._open) / len(self._open))
                    self._open.clear()
        while len(self._steps) > KEPT:
            self._steps, self._losses = _halved(self._steps), _halved(self._losses)
            self._stride *= 2
            self._checked //= 2

    def restart(self, step: int, why: str) -> None:
        """A new piece begins: the learning rate, the batch or the number of workers has changed at this step."""
        kept = [(k, loss) for k, loss in zip(self._steps, self._losses, strict=True) if k >= step]
        self._steps, self._losses = [k for k, _ in kept], [loss for _, loss in kept]
        self._open = [each for each in self._open if each[0] >= step]
        self.start, self._checked, self._found = step, 0, None
        self.restarts.append((step, why))

    def fit(self) -> Fit:
        """The curve of the losses so far. Begins a new piece by itself where they have drifted from the last fit."""
        try:
            import numpy as np
        except ImportError:
            return Fit(why=MISSING)
        if self._found is not None and self._found.curve is not None and not self._found.why:
            self._check(self._found, np)
        found = _fit(np.asarray(self._steps) - self.start, np.asarray(self._losses), self.start, np)
        self._found, self._checked = found, len(self._steps)
        return found

    def _check(self, fit: Fit, np: Any) -> None:
        """CUSUM of the losses since the last fit, in both directions."""
        steps, losses = np.asarray(self._steps[self._checked :]), np.asarray(self._losses[self._checked :])
        if not len(steps) or fit.curve is None:
            return
        predicted = np.array([fit.curve.loss(k) for k in steps])
        # A fit of losses without noise is not exact either: less than a two-hundredth of the fall is no drift.
        size = max(fit.deviation, (fit.curve.loss(self.start) - fit.curve.loss(steps[-1])) / 200, 1e-12)
        residuals = np.clip((losses - predicted) / size, -CLIP, CLIP)
        for sign in (1, -1):
            walk = np.concatenate([[0.0], np.cumsum(sign * residuals - SLACK)])
            lowest = np.minimum.accumulate(walk)
            if (walk - lowest).max() > ALARM:
                first = int(walk[: int((walk - lowest).argmax())].argmin())
                self.restart(math.ceil(steps[first]), "the loss has left the fitted curve")
                return


def _bins(x: Array, y: Array, np: Any) -> tuple[Array, Array, Array]:
    """Mean step, winsorised mean and its standard error of each bin; three arrays of one length."""
    edges = np.unique(np.round(np.geomspace(FIRST_STEP, max(x[-1] + 1, FIRST_STEP + 1), BINS + 1)))
    found = []
    places = np.searchsorted(x, edges)
    for low, high in zip(places[:-1], places[1:], strict=True):
        if high - low >= FEWEST_IN_BIN:
            values = np.clip(y[low:high], *np.quantile(y[low:high], [0.05, 0.95]))
            found.append((x[low:high].mean(), values.mean(), values.std() / math.sqrt(high - low) + 1e-9))
    bins = np.array(found).reshape(-1, 3).T
    return bins[0], bins[1], bins[2]


def _fit(x: Array, y: Array, start: int, np: Any) -> Fit:
    if len(x) < FEWEST_BINS * FEWEST_IN_BIN:
        return Fit(_typical(y, start), None, f"only {len(x)} losses so far, a typical curve is assumed")
    k, mean, error = _bins(x, y, np)
    if len(k) < FEWEST_BINS:
        return Fit(_typical(y, start), None, f"only {len(k)} bins of losses so far, a typical curve is assumed")
    exponential = fit_exponential(k + start, mean)
    shifts = np.concatenate([[0.0], np.geomspace(1, x[-1], SHIFTS - 1)])
    power, shift = (each.ravel() for each in np.meshgrid(np.array(POWERS), shifts, indexing="ij"))
    base = (k[None, :] + shift[:, None] + 1) / (k[0] + shift[:, None] + 1)
    form = base ** -power[:, None]  # [points of the grid, bins], 1 at the first bin
    weight = np.broadcast_to(1 / error, form.shape)
    for _ in range(ROUNDS):
        floor, scale = _non_negative(form, mean, weight**2, np)
        residual = (mean - floor[:, None] - scale[:, None] * form) / error
        spread = np.maximum(1.4826 * np.median(np.abs(residual), axis=1), 1e-6)[:, None]
        weight = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(residual), 1e-12)) / error
    best = int(np.minimum(residual**2, 9.0).sum(axis=1).argmin())
    curve = Curve(
        float(floor[best]),
        float(scale[best] * (k[0] + shift[best] + 1) ** power[best]),
        float(power[best]),
        float(shift[best]),
        float(start),
    )
    predicted = curve.floor + curve.scale * (x + curve.shift + 1) ** -curve.power
    deviation = float(1.4826 * np.median(np.abs(y - predicted)))
    fall = curve.loss(start + k[0]) - curve.loss(start + k[-1])
    if fall <= 3 * math.hypot(error[0], error[-1]):
        return Fit(None, exponential, "the loss does not descend", deviation)
    if power[best] in (POWERS[0], POWERS[-1]):
        return Fit(None, exponential, "the loss does not follow a power of the step", deviation)
    return Fit(curve, exponential, "", deviation)


def _typical(losses: Array, start: int) -> Curve:
    """A curve from the first losses towards 0 with the root of the step. Early checkpoints are worth most, and only the
    form of the curve decides when to make them; without a failure its scale is 1.
    """
    return Curve(0.0, float(sorted(losses)[len(losses) // 2]) if len(losses) else 1.0, 0.5, 0.0, float(start))


def _non_negative(form: Array, y: Array, weight: Array, np: Any) -> tuple[Array, Array]:
    """Weighted least squares of ``y = floor + scale form`` with both at least 0, for each row of ``form``."""
    ones, f, ff = weight.sum(1), (weight * form).sum(1), (weight * form**2).sum(1)
    of_y, fy = (weight * y).sum(1), (weight * form * y).sum(1)
    scale = (ones * fy - f * of_y) / np.maximum(ones * ff - f**2, 1e-300)
    floor = (of_y - scale * f) / ones
    no_floor, flat = floor < 0, scale < 0
    scale = np.where(no_floor, np.maximum(fy / ff, 0.0), np.where(flat, 0.0, scale))
    floor = np.where(flat, np.maximum(of_y / ones, 0.0), np.maximum(floor, 0.0))
    return floor, scale


def fit_exponential(steps: Array, losses: Array) -> Exponential | None:
    """COCI's form: least squares of ``exp(decay k + level)``, started from the logarithm's, by Gauss-Newton. Each value
    counts for the steps up to its neighbours. None where a loss is not above 0.
    """
    import numpy as np

    if len(steps) < 3 or losses.min() <= 0:
        return None
    weight = np.sqrt(np.gradient(steps))
    decay, level = np.polyfit(steps, np.log(losses), 1, w=weight)
    for _ in range(30):
        value = np.exp(np.clip(decay * steps + level, -50, 50))
        matrix = np.stack([steps * value, value], 1) * weight[:, None]
        slope, shift = np.linalg.lstsq(matrix, (losses - value) * weight, rcond=None)[0]
        decay, level = decay + slope, level + shift
        if abs(shift) < 1e-10 and abs(slope * steps[-1]) < 1e-10:
            break
    return Exponential(float(decay), float(level)) if math.isfinite(decay) and math.isfinite(level) else None


def _halved(values: list[float]) -> list[float]:
    """The mean of each two, and the last as it is if there is an odd number."""
    return [sum(values[i : i + 2]) / len(values[i : i + 2]) for i in range(0, len(values), 2)]


# -- where a new piece of the curve begins ----------------------------------------------------------------------------
#
# The learning rate jumps, or updates take another number of batches. Schedules that change the rate all the time
# (warm-up, cosine, decay at each step) must not cut the curve into pieces: the fit follows their losses. A jump is a
# change by more than a factor of 1.5 of a rate that was steady before: a decay by milestones, a warm restart, a rate
# set by hand.


#: A rate is steady if it has stayed within this factor for so many step boundaries; a change beyond it is a jump.
FACTOR, STEADY = 1.5, 20


class Pieces:
    """Watches one job, step boundary by step boundary. Pure: no clock, no files."""

    def __init__(self) -> None:
        self._rates: deque[tuple[float, ...]] = deque(maxlen=STEADY)
        self._version = -1
        self._since = 0
        self._windows: tuple[int, int] = (0, 0)  # batches of the last two updates
        self._batches = 0

    def at_boundary(self, boundary: int, version: int, rates: Sequence[float]) -> str:
        """Why a new piece begins with the batch after this boundary; empty where none does. ``version`` counts updates;
        ``rates`` are the learning rates of all parameter groups.
        """
        batches = self._accumulation(boundary, version)
        return self._jump(tuple(rates)) or batches

    def _jump(self, rates: tuple[float, ...]) -> str:
        before = self._rates
        why = ""
        if before and rates != before[-1]:
            if len(rates) != len(before[-1]):
                why = f"{len(rates)} parameter groups instead of {len(before[-1])}"
            elif len(before) == STEADY:
                for old, new, *earlier in zip(before[-1], rates, *before, strict=True):
                    if not why and _apart(old, new) and not _apart(min(earlier), max(earlier)):
                        why = f"the learning rate is {new:g} after {old:g}"
        if why:
            before.clear()
        before.append(rates)
        return why

    def _accumulation(self, boundary: int, version: int) -> str:
        """Two updates in a row after another number of batches than before: one alone may end an epoch."""
        if self._version < 0:
            self._version, self._since = version, boundary
        if version <= self._version:
            return ""
        self._windows = (self._windows[1], boundary - self._since)
        self._version, self._since = version, boundary
        first, second = self._windows
        if first != second or second == self._batches:
            return ""
        before, self._batches = self._batches, second
        return f"an update takes {second} batches instead of {before}" if before else ""


def _apart(one: float, other: float) -> bool:
    low, high = sorted((one, other))
    return high > low * FACTOR
