"""An SQLite log that several connections of this process, and another process, have open at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import sqlalchemy as sa

from semgrad_guard.decision_log.database import Database

OTHER = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('select 1 from sqlite_master'); c.close()"


def test_a_new_connection_leaves_the_locks_of_the_others(tmp_path: Path) -> None:
    """POSIX drops all locks of a process on a file when it closes one descriptor of it. Another process would then take
    itself for the last user, and delete the write-ahead log under the first: https://sqlite.org/howtocorrupt.html"""
    path = tmp_path / "log.db"
    database = Database(path)
    database.open()
    with database._engine.connect() as first, database._engine.connect() as second:
        for connection in (first, second):
            connection.execute(sa.text("select 1 from sqlite_master"))
        before = Path(f"{path}-wal").stat().st_ino
        subprocess.run([sys.executable, "-c", OTHER, str(path)], check=True)
        assert Path(f"{path}-wal").stat().st_ino == before
    database.close()
