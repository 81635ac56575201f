"""Numbers of one row: samples in, figures out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct, field


class Sample(Struct, frozen=True):
    """One measurement, in the unit of its row."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """What it is made of, where a row can tell; in the same unit."""


class Figures(Struct, frozen=True, omit_defaults=True):
    """A row of the table."""

    n: int
    min: float
    p50: float
    p99: float
    unit: str
    command: str
    """What was timed: our calls as one writes them, a peer's exact command line."""
    parts: dict[str, float] = field(default_factory=dict)
    """Medians of the samples' parts."""


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest of `values`, of which there is at least one. `share`: 0 to 1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def summarise(samples: Sequence[Sample], unit: str, command: str) -> Figures:
    """At least one sample. Figures are rounded to four significant digits: more would be noise."""
    values = [sample.value for sample in samples]
    names = dict.fromkeys(name for sample in samples for name in sample.parts)
    parts = {name: [sample.parts[name] for sample in samples if name in sample.parts] for name in names}
    return Figures(
        n=len(values),
        min=rounded(min(values)),
        p50=rounded(percentile(values, 0.5)),
        p99=rounded(percentile(values, 0.99)),
        unit=unit,
        command=command,
        parts={name: rounded(percentile(each, 0.5)) for name, each in parts.items()},
    )


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
