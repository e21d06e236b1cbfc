"""The fit of the loss: recovery of known curves, spikes, drift, and what is no descending curve."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from shared_core.checkpoint.curve import Curve, CurveFitter, Fit


def fed(losses: Any, first: int = 1, fitter: CurveFitter | None = None) -> CurveFitter:
    fitter = fitter or CurveFitter()
    fitter.feed(range(first, first + len(losses)), [float(loss) for loss in losses])
    return fitter


def fitted(fitter: CurveFitter) -> tuple[Curve, Fit]:
    found = fitter.fit()
    assert found.curve is not None and not found.why, found.why
    return found.curve, found


def noisy(curve: Curve, count: int, seed: int, noise: float = 0.15, spikes: float = 0.003) -> Any:
    random = np.random.default_rng(seed)
    true = np.array([curve.loss(step) for step in range(1, count + 1)])
    return true + random.normal(0, noise, count) + (random.random(count) < spikes) * random.uniform(1, 8, count)


def test_slopes_of_noisy_curves_with_spikes_are_recovered() -> None:
    """Research section 7: slopes on the fitted range within a fifth, and in the middle of the cases nearly right."""
    ratios: dict[int, list[float]] = {2000: [], 4000: []}
    for seed in range(10):
        random = np.random.default_rng(seed + 50)
        power, shift, floor = random.uniform(0.3, 1.1), random.uniform(20, 800), random.uniform(0.1, 1.8)
        true = Curve(floor, (4 - floor) * (shift + 1) ** power, power, shift)
        curve, _ = fitted(fed(noisy(true, 4000, seed)))
        for step, found in ratios.items():
            found.append(curve.slope(step) / true.slope(step))
    assert sorted(ratios[2000])[5] == pytest.approx(1.0, abs=0.1) and sorted(ratios[4000])[5] == pytest.approx(
        1, abs=0.2
    )
    assert all(0.8 < ratio < 1.25 for ratio in ratios[2000]), ratios[2000]
    assert all(0.6 < ratio < 1.6 for ratio in ratios[4000]), ratios[4000]


def test_a_curve_without_noise_is_found_again() -> None:
    true = Curve(1.0, 8.0, 0.6)
    curve, found = fitted(fed([true.loss(step) for step in range(1, 3000)]))
    for step in (100, 1000, 3000, 9000):
        assert curve.loss(step) == pytest.approx(true.loss(step), rel=0.02)
        assert curve.slope(step) == pytest.approx(true.slope(step), rel=0.1)
    assert found.deviation < 0.01
    number = (true.loss(1001) - true.loss(999)) / 2
    assert true.slope(1000) == pytest.approx(number, rel=1e-5)


def test_too_few_losses_give_a_typical_curve() -> None:
    unseen = CurveFitter().fit()
    assert unseen.curve is not None and unseen.curve.slope(1) < 0 and "only 0 losses" in unseen.why
    found = fed([3.0, 2.5, 2.4]).fit()
    assert found.curve is not None and "only 3 losses so far" in found.why
    assert found.curve.loss(1) > found.curve.loss(50) > 0


@pytest.mark.parametrize("kind", ["flat", "rising", "step up"])
def test_what_does_not_descend(kind: str) -> None:
    random = np.random.default_rng(1)
    line = {"flat": np.zeros(2000), "rising": np.linspace(0, 1, 2000), "step up": np.arange(2000) / 1000 // 1}[kind]
    found = fed(2 + line + random.normal(0, 0.05, 2000)).fit()
    assert found.curve is None and found.why == "the loss does not descend"


def test_a_new_piece_begins_when_the_driver_says_so() -> None:
    """The learning rate is divided by ten at step 2000: the loss falls again."""
    first, then = Curve(1.5, 4.0, 0.5), Curve(0.8, 1.0, 0.5, 0.0, 2000.0)
    losses = [*noisy(first, 2000, 5, 0.05), *(noisy(then, 4000, 6, 0.05)[2000:])]
    fitter = fed(losses)
    fitter.restart(2001, "learning rate")
    curve, _ = fitted(fitter)
    assert fitter.restarts == [(2001, "learning rate")] and curve.start == 2001
    for step in (2200, 3500):
        assert curve.slope(step) == pytest.approx(then.slope(step), rel=0.35)
    fitter.feed([5, 6], [100.0, 100.0])
    assert fitter.fit().curve == curve, "losses of an earlier piece are left out"


def test_without_numpy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name == "numpy":
            raise ImportError(name)
        return real(name, *args, **more)

    fitter = fed([3.0] * 100)
    monkeypatch.setattr(builtins, "__import__", refuse)
    found = fitter.fit()
    assert found.curve is None and "pip install 'swift-recovery[all]'" in found.why
