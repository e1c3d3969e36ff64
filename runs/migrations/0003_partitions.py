"""On PostgreSQL, the stream events are in partitions by the week of their run (docs/decisions/0034).

The primary key is (run_id, index). There is no index by id: it would cost an entry for each event, and no query needs
it. SQLite keeps the table of 0001.
"""

from django.db import migrations

from config.kernel import clock
from runs.streams.prune import EVENTS

STATEMENTS = [
    "ALTER TABLE runs_runevent RENAME TO runs_runevent_plain",
    """
    CREATE TABLE runs_runevent (LIKE runs_runevent_plain INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING IDENTITY)
    PARTITION BY RANGE (run_id)
    """,
    "CREATE TABLE runs_runevent_default PARTITION OF runs_runevent DEFAULT",
    "INSERT INTO runs_runevent SELECT * FROM runs_runevent_plain",
    "SELECT setval(pg_get_serial_sequence('runs_runevent', 'id'), max(id)) FROM runs_runevent_plain",
    "DROP TABLE runs_runevent_plain",
    """
    ALTER TABLE runs_runevent ADD CONSTRAINT event_once_per_index PRIMARY KEY (run_id, index),
    ADD CONSTRAINT runs_runevent_run_id_fk FOREIGN KEY (run_id) REFERENCES runs_run DEFERRABLE INITIALLY DEFERRED
    """,
]


def divide(apps, schema_editor):
    if schema_editor.connection.vendor == "postgresql":
        for statement in STATEMENTS:
            schema_editor.execute(statement, params=None)
        EVENTS.create_ahead(clock.now())


class Migration(migrations.Migration):
    dependencies = [("runs", "0002_seeds")]
    operations = [migrations.RunPython(divide, migrations.RunPython.noop)]
