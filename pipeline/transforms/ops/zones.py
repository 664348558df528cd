"""Time zones as tables of offsets from UTC that a compiled loop can look up."""

from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST, LAST = (int((datetime(year, 1, 1, tzinfo=UTC) - EPOCH).total_seconds()) for year in (1900, 2100))
DAY_SECONDS = 86_400


class ZoneOffsets(NamedTuple):
    """Local time minus UTC in seconds: `offsets[k]` from second `since[k]` after 1970, the last one before `until`."""

    since: "npt.NDArray[np.int64]"
    offsets: "npt.NDArray[np.int64]"
    until: int


def fixed_offset(seconds: int) -> ZoneOffsets:
    """Returns one offset for all times."""
    import numpy as np

    return ZoneOffsets(np.array([-(1 << 53)]), np.array([seconds]), 1 << 53)


def check_zone(where: str, zone: str) -> None:
    """Refuses an unknown zone.

    Raises:
        ConfigError: If the time zone database has no such zone.
    """
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(
            where,
            "a zone of the IANA time zone database",
            f"'{zone}'",
            "Write it as in Europe/Berlin. A machine without the database needs the package tzdata.",
        ) from None


@lru_cache
def zone_offsets(zone: str) -> ZoneOffsets:
    """Returns the offsets of a zone from 1900 to 2099, exact to the second.

    Example:
        >>> zone_offsets("Asia/Tokyo").offsets[-1] / 3_600
        np.float64(9.0)
    """
    import numpy as np

    rules = ZoneInfo(zone)

    def offset(second: int) -> int:
        shift = (EPOCH + timedelta(seconds=second)).astimezone(rules).utcoffset()
        assert shift is not None
        return round(shift.total_seconds())

    since, offsets = [FIRST], [offset(FIRST)]
    for end in range(FIRST + DAY_SECONDS, LAST, DAY_SECONDS):
        if offset(end) == offsets[-1]:
            continue
        low, high = end - DAY_SECONDS, end  # the change is in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if offset(middle) == offsets[-1] else (low, middle)
        since.append(high)
        offsets.append(offset(high))
    return ZoneOffsets(np.array(since), np.array(offsets), LAST)
