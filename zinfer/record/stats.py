"""Statistics of samples: their mean with its confidence interval, and percentiles."""

from collections.abc import Sequence
from math import ceil, fsum, sqrt
from statistics import fmean
from typing import NamedTuple

# Two-sided 95% quantiles of Student's t by degrees of freedom; NIST/SEMATECH e-Handbook, table 1.3.6.7.2.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T95_LIMIT = 1.96


class Spread(NamedTuple):
    """Mean of samples with half its 95% confidence interval; None, not zero, of one sample."""

    mean: float
    half_width: float | None = None


def stdev(samples: Sequence[float]) -> float:
    """Return the standard deviation of samples. `statistics.stdev` takes 30 times as long."""
    mean = fmean(samples)
    return sqrt(fsum((sample - mean) ** 2 for sample in samples) / (len(samples) - 1))


def ci95_half_width(samples: Sequence[float]) -> float | None:
    """Return half the mean's 95% confidence interval (Student's t), or None."""
    if len(samples) < 2:
        return None
    freedom = len(samples) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _T95_LIMIT + 2.4 / freedom
    return quantile * stdev(samples) / sqrt(len(samples))


def spread(samples: Sequence[float]) -> Spread | None:
    """Return the mean of samples and half its 95% confidence interval; None without samples."""
    return Spread(fmean(samples), ci95_half_width(samples)) if samples else None


def relative_half_width(samples: Sequence[float]) -> float | None:
    """Return half the 95% confidence interval over the mean, or None."""
    half = ci95_half_width(samples)
    return None if half is None else half / fmean(samples)


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """Return the percentile of sorted samples by nearest rank."""
    return ordered[ceil(percent / 100 * len(ordered)) - 1]
