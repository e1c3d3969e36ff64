"""UTC with seconds, in an order in which text sorts by time."""

DATETIME_FORMAT = "Y-m-d H:i:s"
DATE_FORMAT = "Y-m-d"
