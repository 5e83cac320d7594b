"""How soon pages come back, learned from those that did.

Covers, for each class of pages, how likely a page of some age is used next (its hazard), and from
that what a page is worth: the most uses to be had for the room it takes until then. Does not
cover which class a page is in (`pie.policies.adaptive`).

Ages are ticks since the last use, in bins that grow by half an octave. A hazard is uses seen at an
age over pages seen at that age (exposure), so it needs no page's life to its end, and what goes
unseen, such as a ghost that was forgotten, does not bend it. Worth is the Gittins index: for a page
of age a, over all horizons h, the largest ratio of P(used before h) to the expected ticks until
it is used or h is reached (Gittins 1979; hit density after Beckmann, Chen and Cidon, "LHD", NSDI 2018).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]

_BINS_PER_OCTAVE = 2
_OCTAVES_BELOW = 4
"""The youngest bin ends at a sixteenth of the tier's pages."""
_OCTAVES = 8
"""From there to 16 times the pages of the tier: what comes back later is not kept for it."""
BINS = _OCTAVES * _BINS_PER_OCTAVE + 2
HORIZON = 1 << (_OCTAVES - _OCTAVES_BELOW)
"""How far back is looked, in times the pages of the tier."""

_DECAY = 0.97
"""What is left of old counts at an update; updates come eight to a tier's length."""
_PRIOR_PAGES = 60.0
"""A class is taken to be like all of them until it has been seen for so many tier lengths by one
page, in ticks."""


class Returns:
    """Learns how soon pages of `classes` classes come back."""

    def __init__(self, classes: int) -> None:
        self._uses = np.zeros((classes, BINS))
        self._exposure = np.zeros((classes, BINS))
        self._scale = 0
        self.set_length(64)

    @property
    def length(self) -> int:
        """The tier's pages, rounded down to a power of two."""
        return 1 << self._scale

    def set_length(self, pages: int) -> None:
        """Learn how many pages the tier holds; what is known stays with its ages."""
        scale = max(6, pages.bit_length() - 1)
        shift = (scale - self._scale) * _BINS_PER_OCTAVE
        if not shift:
            return
        self._scale = scale
        self._uses = _shifted(self._uses, shift)
        self._exposure = _shifted(self._exposure, shift)

    def bin_of(self, age: int) -> int:
        """Return the bin of an age in ticks."""
        relative = age / (1 << (self._scale - _OCTAVES_BELOW))
        if relative < 1:
            return 0
        return min(BINS - 1, int(math.log2(relative) * _BINS_PER_OCTAVE) + 1)

    def bins_of(self, ages: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
        """Return the bins of many ages."""
        relative = np.maximum(ages / (1 << (self._scale - _OCTAVES_BELOW)), 0.5)
        bins: npt.NDArray[np.intp]
        bins = np.floor(np.log2(relative) * _BINS_PER_OCTAVE).astype(np.intp) + 1
        bins[relative < 1] = 0
        bins[bins >= BINS] = BINS - 1
        return bins

    def used(self, kind: int, age: int) -> None:
        """Count a use of a page of a class at an age."""
        if age < self.length * HORIZON:
            self._uses[kind, self.bin_of(age)] += 1

    def seen(
        self,
        kinds: npt.NDArray[np.intp],
        ages: npt.NDArray[np.int64],
        *,
        ticks: int,
        weight: float,
    ) -> None:
        """Count pages that were there for `ticks`, each for `weight` of them."""
        recent = ages < self.length * HORIZON
        at = kinds[recent] * BINS + self.bins_of(ages[recent])
        counts = np.bincount(at, minlength=self._exposure.size)[: self._exposure.size]
        self._exposure += counts.reshape(self._exposure.shape) * (ticks * weight)

    def fade(self) -> None:
        """Let older counts weigh less."""
        self._uses *= _DECAY
        self._exposure *= _DECAY

    def worth(self) -> _Floats:
        """Return what pages are worth, `[classes, BINS]`, in uses a page and tick."""
        uses, exposure = _smoothed(self._uses), _smoothed(self._exposure)
        together = uses.sum(axis=0) / np.maximum(exposure.sum(axis=0), 1.0)
        prior = _PRIOR_PAGES * self.length
        hazard = (uses + together * prior) / (exposure + prior)
        widths = np.empty(BINS)
        unit = 2.0 ** (self._scale - _OCTAVES_BELOW)
        edges = unit * 2.0 ** (np.arange(BINS) / _BINS_PER_OCTAVE)
        widths[0] = unit
        widths[1:] = np.diff(edges)
        # Cumulated over bins from 0; what begins at bin a is relative to the value before it.
        log_left = np.cumsum(-hazard * widths, axis=1)
        left = np.exp(log_left)
        before = np.concatenate([np.ones((len(left), 1)), left[:, :-1]], axis=1)
        waited = np.cumsum((before + left) / 2 * widths, axis=1)
        waited_before = np.concatenate([np.zeros((len(left), 1)), waited[:, :-1]], axis=1)
        used = before[:, :, None] - left[:, None, :]
        taken = waited[:, None, :] - waited_before[:, :, None]
        ahead = np.triu(np.ones((BINS, BINS), dtype=bool))
        ratio = np.where(ahead, used / np.where(ahead, np.maximum(taken, 1e-300), 1.0), 0.0)
        return np.asarray(ratio.max(axis=2))


def _smoothed(counts: _Floats) -> _Floats:
    """Return counts blurred over neighbouring ages: a bin alone sees too few pages."""
    for _ in range(2):
        padded = np.pad(counts, ((0, 0), (1, 1)), mode="edge")
        counts = (padded[:, :-2] + 2 * counts + padded[:, 2:]) / 4
    return counts


def _shifted(counts: _Floats, shift: int) -> _Floats:
    """Return counts by age moved to younger bins, or to older ones where `shift` is negative."""
    moved = np.zeros_like(counts)
    for at in range(BINS):
        moved[:, min(max(at - shift, 0), BINS - 1)] += counts[:, at]
    return moved
