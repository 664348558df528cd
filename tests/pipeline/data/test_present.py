"""Which day is the newest, where some clocks are wrong."""

import datetime

from pipeline.data.present import last_possible_day, newest_day, today

DAY = datetime.timedelta(days=1)


def test_the_newest_day_has_begun():
    days = [today() - 3 * DAY, today() - 2 * DAY]
    assert newest_day(days) == days[1]
    assert newest_day([*days, today() + DAY, datetime.date(2038, 1, 19)]) == days[1]
    assert newest_day([datetime.date(2038, 1, 19)]) is None
    assert last_possible_day() == today() + DAY
