"""With seconds, and in the order that sorts; always UTC."""

DATETIME_FORMAT = "Y-m-d H:i:s"
DATE_FORMAT = "Y-m-d"
