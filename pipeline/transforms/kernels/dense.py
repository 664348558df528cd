"""Loops of the ops that read numbers."""

import numpy as np

from pipeline.transforms.kernels.hashing import Floats, Ids
from storage.compiled import compiled


@compiled
def clamp(values: Floats, low: float, high: float) -> tuple[Floats, int]:
    """Limits numbers to [low, high] and keeps NaN: (numbers, how many were outside)."""
    out = np.empty(len(values), np.float64)
    outside = 0
    for i in range(len(values)):
        value = values[i]
        out[i] = low if value < low else high if value > high else value
        outside += value < low or value > high
    return out, outside


@compiled
def fill(values: Floats, value: float) -> tuple[Floats, int]:
    """Replaces NaN by `value`: (numbers, how many were filled)."""
    out = np.empty(len(values), np.float64)
    filled = 0
    for i in range(len(values)):
        missing = np.isnan(values[i])
        out[i] = value if missing else values[i]
        filled += missing
    return out, filled


@compiled
def logit(values: Floats, eps: float, invalid: float) -> tuple[Floats, int]:
    """Computes log(p / (1 - p)) of p limited to [eps, 1 - eps]: (numbers, how many were invalid).

    A p outside [0, 1] becomes `invalid`. NaN stays.
    """
    out = np.empty(len(values), np.float64)
    bad = 0
    for i in range(len(values)):
        p = values[i]
        if np.isnan(p):
            out[i] = p
        elif p < 0.0 or p > 1.0:
            out[i] = invalid
            bad += 1
        else:
            p = min(max(p, eps), 1.0 - eps)
            out[i] = np.log(p / (1.0 - p))
    return out, bad


@compiled
def box_cox(values: Floats, power: float, shift: float, invalid: float) -> tuple[Floats, int]:
    """Computes ((x + shift)^power - 1) / power, log(x + shift) at power 0: (numbers, how many were invalid).

    If x + shift is at or below 0 or infinite, the number becomes `invalid`. NaN stays.
    """
    out = np.empty(len(values), np.float64)
    bad = 0
    for i in range(len(values)):
        x = values[i] + shift
        if np.isnan(x):
            out[i] = x
        elif x <= 0.0 or np.isinf(x):
            out[i] = invalid
            bad += 1
        elif power == 0.0:
            out[i] = np.log(x)
        else:
            out[i] = np.expm1(power * np.log(x)) / power  # x**power - 1 loses all digits near power 0
    return out, bad


@compiled
def bucketize(values: Floats, borders: Floats) -> tuple[Ids, Ids]:
    """Finds the first border at or above each value: (indices as lists of one, offsets). NaN gives an empty list."""
    out = np.empty(len(values), np.int64)
    starts = np.empty(len(values) + 1, np.int64)
    starts[0] = 0
    for i in range(len(values)):
        present = not np.isnan(values[i])
        if present:
            out[starts[i]] = np.searchsorted(borders, values[i])
        starts[i + 1] = starts[i] + present
    return out[: starts[-1]], starts


@compiled
def onehot(values: Floats, size: int, invalid: int) -> tuple[Ids, Ids, int]:
    """Turns whole numbers in [0, size) into lists of one id: (values, offsets, how many others).

    NaN gives an empty list. Other numbers become `invalid`, or an empty list if that is negative.
    """
    out = np.empty(len(values), np.int64)
    starts = np.zeros(len(values) + 1, np.int64)
    bad = 0
    for i in range(len(values)):
        value, place = values[i], starts[i]
        if value >= 0.0 and value < size and value == np.floor(value):
            out[place] = np.int64(value)
            place += 1
        elif not np.isnan(value):
            bad += 1
            if invalid >= 0:
                out[place] = invalid
                place += 1
        starts[i + 1] = place
    return out[: starts[-1]], starts, bad


@compiled
def local_hours(
    times: Floats,
    per_second: int,
    shifts: Floats,
    shift_seconds: int,
    since: Ids,
    offsets: Ids,
    until: int,
    part: int,
) -> tuple[Ids, Ids, int]:
    """Computes a part of the local time of each time, as lists of one: (values, offsets, how many were invalid).

    Part 0 is the hour, 0 to 23; 1 the weekday, 0 (Monday) to 6; 2 the month, 0 (January) to 11, by the Gregorian
    calendar: Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days.

    `offsets[k]` applies from second `since[k]`, the last one before second `until`. `shifts` (none, or one per row)
    are added. NaN gives an empty list.
    """
    out = np.empty(len(times), np.int64)
    starts = np.zeros(len(times) + 1, np.int64)
    bad = 0
    for i in range(len(times)):
        starts[i + 1] = starts[i]
        shift = shifts[i] * shift_seconds if len(shifts) else 0.0
        if np.isnan(times[i]) or np.isnan(shift):
            continue
        if abs(times[i]) >= 2.0**53 or abs(shift) > 86_400.0:
            bad += 1
            continue
        second = np.int64(np.floor(times[i])) // per_second  # floored, as times before 1970 need
        if second < since[0] or second >= until:
            bad += 1
            continue
        local = second + offsets[np.searchsorted(since, second, side="right") - 1] + np.int64(np.floor(shift))
        day = local // 86_400
        if part == 0:
            out[starts[i]] = local // 3_600 % 24
        elif part == 1:
            out[starts[i]] = (day + 3) % 7  # 1970-01-01 was a Thursday
        else:
            of_era = (day + 719_468) % 146_097  # eras of 400 years from 0000-03-01 on
            year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
            since_march = of_era - (365 * year + year // 4 - year // 100)
            out[starts[i]] = ((5 * since_march + 2) // 153 + 2) % 12
        starts[i + 1] += 1
    return out[: starts[-1]], starts, bad
