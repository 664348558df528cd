"""Config of the generated logs."""

import datetime
from typing import Literal

from pydantic import (
    BaseModel,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from pipeline.errors import ConfigError


class GeneratorConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Size of the logs, distribution of the ids, and difficulty of the planted model.

    The planted model itself (weights of columns and ids) is fixed. Another `seed` draws other rows from the same model.
    """

    seed: NonNegativeInt = 0
    """Seeds every draw together with the day and the chunk."""
    start_day: datetime.date = datetime.date(2024, 1, 1)
    """First day of the log. Drift counts from here."""
    days: PositiveInt = 7
    """Days of impressions. A longer log begins with exactly the rows of a shorter one."""
    rows_per_day: PositiveInt = Field(default=120_000, lt=10**10)
    """Impressions per day."""
    chunk_rows: PositiveInt = 50_000
    """Rows drawn and held in memory at once, and row group size of the files. Another value draws other rows."""
    session_mean_rows: float = Field(default=4.0, ge=1)
    """Mean impressions of a session. The number has a geometric distribution."""
    lists_per: Literal["row", "session"] = "row"
    """Whether a user's lists (recent items, searches) are drawn for each impression or once for a session."""

    watched_per_day: float = Field(default=0.0, ge=0)
    """Mean events of a user a day in a third log, of what users watched: `cat_user`, `watched_at` and
    `watched_category`. The categories of a user's last ten events, a minute or more before an impression, then change
    the probability of a click. 0: no such log. Otherwise 1 or more."""

    users: PositiveInt = 20_000
    """Vocabulary of cat_user at any time."""
    items: PositiveInt = 10_000
    """Vocabulary of cat_item and list_recent_items at any time."""
    categories: PositiveInt = 100
    """Vocabulary of cat_category and list_recent_categories; an item has one category."""
    advertisers: PositiveInt = 500
    """Vocabulary of cat_advertiser and list_recent_advertisers; an item has one advertiser."""
    countries: PositiveInt = 40
    """Vocabulary of cat_country; a user has one country."""
    devices: PositiveInt = 8
    """Vocabulary of cat_device."""
    interests: PositiveInt = 200
    """Vocabulary of list_interests at any time."""
    search_terms: PositiveInt = 2_000
    """Vocabulary of list_search_terms at any time."""
    zipf_exponent: NonNegativeFloat = 1.25
    """Popularity of rank r is proportional to r ** -exponent, for every vocabulary except the users."""
    user_zipf_exponent: NonNegativeFloat = 0.7
    """The same for users. Their activity is less skewed."""
    list_length_exponent: NonNegativeFloat = 2.0
    """The probability of a list of n ids is roughly proportional to (n + 1) ** -exponent."""
    list_limit_ids: PositiveInt = 50
    """Longest list."""
    most_nulls_share: float = Field(default=0.2, ge=0, le=1)
    """Null share of the column with most nulls. The others have fixed fractions of it."""

    base_logit: FiniteFloat = -1.7
    """Log-odds of a click when every effect is zero."""
    signal_strength: NonNegativeFloat = 1.0
    """Scales every planted effect. With 0 there is nothing to learn."""
    head_ids: PositiveFloat = 20.0
    """An id of rank r weighs (1 + r / head_ids) ** -0.5 as much as the most popular. Rare ids carry little signal."""
    drift_strength: NonNegativeFloat = 1.0
    """Scales the daily change of popularity, dense means and base rate. With 0 all days are alike."""

    lost_share: float = Field(default=0.03, ge=0, lt=1)
    """Share of clicks that never reach the outcome log."""
    duplicate_share: float = Field(default=0.01, ge=0, le=1)
    """Share of logged clicks with a second entry a few seconds later."""
    mean_delay_seconds: PositiveFloat = 600.0
    """Mean of the exponential delay between impression and outcome."""

    @field_validator("watched_per_day")
    @classmethod
    def _users_watch_daily(cls, value: float) -> float:
        if 0 < value < 1:
            remedy = "Raise it: the log begins early enough for every user to have ten events before the first day."
            raise ConfigError("source.generator.watched_per_day", "0, or 1 or more", f"{value:g}", remedy)
        return value

    @property
    def chunks_per_day(self) -> int:
        """Chunks of a day. The last one may be shorter."""
        return -(-self.rows_per_day // self.chunk_rows)

    @property
    def dates(self) -> tuple[datetime.date, ...]:
        """Days with impressions, in order."""
        return tuple(self.start_day + datetime.timedelta(days=day) for day in range(self.days))
