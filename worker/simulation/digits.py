"""A world on data that nobody here made: scikit-learn's images of digits as a cascade.

Each of the ten classes is an ad, all of the same revenue. A user has an image as context, and clicks the ad of its
class with probability 0.9 and any other with 0.05. 64 pixels say which class it is, and no pixel says it alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import Floats, Ints
from worker.errors import FailedError, InputError

OWN, OTHER = 0.9, 0.05  # click probability on the ad of the own class, and on any other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DigitsTruth:
    """The true click model: images (rows, 64), standardised, and the class of each, (rows,).

    A context is one of the images, to the bit.
    """

    PIXELS: ClassVar[int] = 64
    CLASSES: ClassVar[int] = 10

    images: Floats
    classes: Ints
    rows: dict[bytes, int]

    @classmethod
    def load(cls) -> DigitsTruth:
        """Return the data of scikit-learn; they come with the package."""
        return _loaded()

    @property
    def dim(self) -> int:
        """The number of pixels."""
        return self.PIXELS

    @property
    def arms(self) -> int:
        """The number of classes."""
        return self.CLASSES

    @property
    def biases(self) -> Floats:
        """The log-odds of the mean click probability of each arm, (K,)."""
        shares = np.bincount(self.classes, minlength=self.CLASSES) / len(self.classes)
        chances = OTHER + shares * (OWN - OTHER)
        return np.asarray(np.log(chances / (1 - chances)))

    @property
    def effects(self) -> Floats:
        """Zeros, (d,): no pixel makes users click more on all arms."""
        return np.zeros(self.PIXELS)

    def log_odds(self, contexts: Floats) -> Floats:
        """Return the log-odds of a click: (n, d) → (n, K)."""
        return _log_odds(self.classes_of(contexts)[:, None] == np.arange(self.CLASSES))

    def log_odds_of(self, contexts: Floats, arms: Ints) -> Floats:
        """Return the log-odds of chosen arms, −inf for NO_ARM and for K: (n, d), (n, h) → (n, h)."""
        odds = _log_odds(self.classes_of(contexts)[:, None] == arms)
        return np.where((arms >= 0) & (arms < self.CLASSES), odds, -np.inf)

    def classes_of(self, contexts: Floats) -> Ints:
        """Return the class of each image, (n, d) → (n,)."""
        rows = [self.rows.get(np.ascontiguousarray(context).tobytes(), -1) for context in contexts]
        if -1 in rows:
            raise InputError("a context of the environment digits must be one of its images")
        return np.asarray(self.classes[rows])


def _log_odds(own: NDArray[np.bool_]) -> Floats:
    return np.asarray(np.where(own, math.log(OWN / (1 - OWN)), math.log(OTHER / (1 - OTHER))), dtype=np.float64)


@cache
def _loaded() -> DigitsTruth:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise FailedError("the environment digits needs scikit-learn: pip install scikit-learn") from None
    pixels, classes = load_digits(return_X_y=True)
    images = np.asarray(pixels, dtype=np.float64)
    deviations = images.std(axis=0)
    # A pixel that is the same in all images stays 0. Adding 0 turns −0.0 into 0.0.
    images = (images - images.mean(axis=0)) / np.where(deviations > 0, deviations, 1.0) + 0.0
    rows = {image.tobytes(): row for row, image in enumerate(images)}
    return DigitsTruth(images=images, classes=np.asarray(classes, dtype=np.intp), rows=rows)
