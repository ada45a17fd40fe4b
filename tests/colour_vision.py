"""Differences of colours, also for people with colour vision deficiencies.

Machado, Oliveira and Fernandes (2009), "A Physiologically-based Model for Simulation of Color
Vision Deficiency", table 1 at severity 1: matrices on linear RGB.  Differences are those of CIE
L*a*b* (1976) under D65; about 2 is the smallest visible one.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Colour = NDArray[np.float64]
SIGHTS = {
    "all colours": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)
WHITE = XYZ.sum(axis=1)


def linear(colour: str) -> Colour:
    """Convert #rrggbb to linear RGB."""
    parts = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def to_lab(colour: str, vision: str) -> Colour:
    """Convert a colour to L*a*b* for one kind of colour vision."""
    x = XYZ @ np.clip(SIGHTS[vision] @ linear(colour), 0, 1) / WHITE
    f = np.where(x > (6 / 29) ** 3, np.cbrt(x), x / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def nearest_pair(colours: list[str]) -> tuple[float, str]:
    """The least difference of two colours for any kind of vision, and which pair has it."""
    differences = [
        (float(np.linalg.norm(to_lab(a, vision) - to_lab(b, vision))), f"{a} and {b}, {vision}")
        for a, b in combinations(colours, 2)
        for vision in SIGHTS
    ]
    return min(differences)


def contrast(a: str, b: str) -> float:
    """The contrast of the Web Content Accessibility Guidelines: 1 to 21."""
    darker, lighter = sorted(float(XYZ[1] @ linear(colour)) for colour in (a, b))
    return (lighter + 0.05) / (darker + 0.05)
