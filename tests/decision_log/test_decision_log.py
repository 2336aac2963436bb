"""A decision that has an id is in the log, whatever happens to the process, the disk or the database.

An SQLite log that several connections of this process, and another process, have open at once.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from semgrad_guard import GenerationOptions, Guard, LanguageModel, Policy, Router, Verdict

pytest.importorskip("sqlalchemy", reason="the extra `log` is not installed")

import sqlalchemy as sa

from semgrad_guard.decision_log.database import Database
from semgrad_guard.decision_log.decision_log import DecisionLog
from semgrad_guard.decision_log.entries import Decision, Facts, parse_since
from semgrad_guard.errors import DecisionLogError, InputError
from semgrad_guard.records import SentenceVerdict
from tests.ports import free_port

OPTIONS = GenerationOptions(max_tokens=4)


def verdict(text: str = "an answer", **changes: Any) -> Verdict:
    fields = {"status": "scored", "action": "answer", "text": text, "estimator": "e", "model": "m", "uncertainty": 0.5}
    return Verdict.of(**{**fields, **changes})


def rows(path: Path) -> dict[str, Decision]:
    database = Database(path)
    try:
        return {decision.id: decision for decision, _ in database.decisions()}
    finally:
        database.close()


def test_the_sentences_of_an_answer_are_in_its_row(tmp_path: Path) -> None:
    """With their place in the delivered text; a reader who may not see a draft's score does not see theirs."""
    judged = (SentenceVerdict(start=0, end=9, uncertainty=0.2), SentenceVerdict(start=9, end=9, action="drop"))
    with DecisionLog(tmp_path / "log.db") as log:
        log.write(verdict("A is one.", draft="A is one. B is two.", sentences=judged))
        log.write(verdict())
        assert log.flush()
        (whole, _), (part, _) = log.database.decisions()
    assert (part.sentences, whole.sentences) == (judged, None)
    assert part.without_score().sentences is None


def test_a_decision_is_a_row(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        one = log.write(verdict(), seconds=1.5, facts=Facts(request_id="r", served="s", question="secret question"))
        other = log.write(verdict("no", action="abstain", draft="secret draft"))
        log.database.mark_drawn([str(one)])
        log.feedback(str(one), right=False)
        assert log.flush()
        assert log.pending == 0
        found = log.database.decisions()
    assert {decision.id for decision, _ in found} == {one, other}
    decision, feedback = next(pair for pair in found if pair[0].id == one)
    assert (decision.action, decision.uncertainty, decision.seconds) == ("answer", 0.5, 1.5)
    assert (decision.request_id, decision.served) == ("r", "s")
    assert feedback is not None
    assert (feedback.right, feedback.sampling) == (False, "random")
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"secret" not in everything
    assert b"an answer" not in everything
    assert [path.name for path in tmp_path.iterdir()] == ["log.db"]  # there was no need of a journal


def test_texts_only_where_they_are_asked_for_and_drafts_never(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db", text=True) as log:
        log.write(verdict("I don't know.", action="abstain", draft="the draft"), facts=Facts(question="why\0\ud800?"))
    (decision,) = rows(tmp_path / "log.db").values()
    assert (decision.question, decision.delivered) == ("why\ufffd??", "I don't know.")
    assert not any(b"the draft" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_guard_writes_to_it(tmp_path: Path, language_model: LanguageModel) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        policy = Policy(threshold=-1.0)
        guards = [
            Guard(language_model, Router(policy, log=log, mode=mode), options=OPTIONS)
            for mode in ("enforce", "annotate")
        ]
        found = [guard("question") for guard in guards]
        streamed = guards[0].stream("question").verdict
    written = rows(tmp_path / "log.db")
    assert set(written) == {result.decision_id for result in (*found, streamed)}
    assert [written[str(result.decision_id)].enforced for result in found] == [True, False]
    assert all(decision.seconds is not None and decision.seconds > 0 for decision in written.values())
    assert [written[str(result.decision_id)].tokens for result in found] == [
        None,
        4,
    ]  # a withheld draft's are its secret
    with pytest.raises(InputError, match="log must be a DecisionLog"):
        Router(policy, log="log.db")  # type: ignore[arg-type]


async def test_on_the_event_loop_too(tmp_path: Path, language_model: LanguageModel) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        guard = Guard(language_model, Router(Policy(threshold=1e9), log=log), options=OPTIONS)
        found = await guard.abatch(["one", "two"])
        stream = guard.astream("three")
        last = await stream.verdict()
    assert set(rows(tmp_path / "log.db")) == {result.decision_id for result in (*found, last)}


KILLED = """
import sys, threading
from pathlib import Path
from semgrad_guard import Verdict
from semgrad_guard.decision_log.decision_log import DecisionLog
log = DecisionLog(sys.argv[1], journal=Path(sys.argv[2]) if sys.argv[2:] else None)
verdict = Verdict.of(status="scored", action="answer", text="", estimator="e", model="m", uncertainty=0.5)
lock = threading.Lock()
def work():
    while True:
        found = log.write(verdict)
        with lock:
            print(found, flush=True)
for _ in range(4):
    threading.Thread(target=work).start()
"""


def killed(log: str | Path, count: int, *, journal: Path | None = None) -> set[str]:
    """The ids that a process has printed before it was killed: at least so many."""
    command = [sys.executable, "-c", KILLED, log, *([journal] if journal else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        acknowledged = {process.stdout.readline().strip() for _ in range(count)}
        os.kill(process.pid, signal.SIGKILL)
        return acknowledged | {line.strip() for line in process.stdout.readlines() if line.endswith("\n")}


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Another program has the file's lock, as in the middle of a long transaction."""
    other = sqlite3.connect(path)
    other.execute("begin exclusive")
    try:
        yield
    finally:
        other.close()


def test_a_killed_process_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    acknowledged = set[str]().union(*(killed(path, count) for count in (1, 40, 150)))
    assert acknowledged - set(rows(path)) == set()  # they need no other process that takes them up
    with locked(path):
        behind = killed(path, 60)
    assert behind & set(rows(path)) == set()
    with DecisionLog(path) as log:
        assert log.write(verdict()) is not None
    assert acknowledged | behind <= set(rows(path))
    assert len(behind) >= 60


def test_a_locked_file_costs_neither_ids_nor_decisions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        ids = [log.write(verdict())]
        with locked(tmp_path / "log.db"):
            ids += [log.write(verdict("an answer")) for _ in range(3)]
            assert log.feedback(str(ids[-1]), right=True).decision_id == ids[-1]
            assert log.pending == 4
            assert log.flush() is False
            assert len(log.database.decisions()) == 1  # readers do not wait for the lock
        assert log.flush()
        assert log.pending == 0
        ids.append(log.write(verdict()))
        assert log.pending == 0  # in the file itself again
        assert log.failures == 0
        found = log.database.decisions()
    assert [decision.id for decision, _ in reversed(found)] == ids
    assert found[1][1] is not None
    assert not [record for record in caplog.records if "an answer" in record.getMessage()]


def test_the_database_may_be_away(tmp_path: Path) -> None:
    folder = tmp_path / "away"
    log = DecisionLog(folder / "log.db", journal=tmp_path / "journal")  # the database's folder is missing
    try:
        ids = {log.write(verdict()) for _ in range(3)}
        assert None not in ids
        assert log.flush() is False
        assert log.pending == 3
        with pytest.raises(DecisionLogError, match="cannot be used"):
            log.database.decisions()
        folder.mkdir()
    finally:
        log.close()
    assert set(rows(folder / "log.db")) <= ids
    with DecisionLog(folder / "log.db", journal=tmp_path / "journal"):
        pass
    assert set(rows(folder / "log.db")) == ids


@pytest.mark.parametrize("kind", ["no folder", "no database", "nobody listens"])
def test_an_unreachable_log_says_why_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """At the start, before there is a decision; then it is quiet until the database is back."""
    (tmp_path / "text.db").write_text("This is no database, and long enough to be taken for none. " * 20)
    url, why = {
        "no folder": (tmp_path / "away" / "log.db", "unable to open database file"),
        "no database": (tmp_path / "text.db", "file is not a database"),
        "nobody listens": (f"postgresql+psycopg://me:a-password@127.0.0.1:{free_port()}/log", "refused"),
    }[kind]
    if kind == "nobody listens":
        pytest.importorskip("psycopg")
    with DecisionLog(url, journal=tmp_path / "journal") as log:
        while not (errors := [record for record in caplog.records if record.levelname == "ERROR"]):
            threading.Event().wait(0.01)
        assert log.write(verdict("the secret answer")) is not None
        assert log.flush() is False  # it has been tried again
        assert [record for record in caplog.records if record.levelname == "ERROR"] == errors
        assert why in errors[0].getMessage()
        assert "a-password" not in caplog.text
        assert "secret" not in caplog.text
        if kind == "no folder":
            (tmp_path / "away").mkdir()
            assert log.flush()
            assert "the decision log is up to date again" in caplog.text


FILLED = """
import resource, signal, sys
from pathlib import Path
from semgrad_guard import Verdict
from semgrad_guard.decision_log.decision_log import DecisionLog
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
verdict = Verdict.of(status="scored", action="answer", text="x" * 5000, estimator="e", model="m", uncertainty=0.5)
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
with DecisionLog(sys.argv[1], text=True) as log:
    ids = [log.write(verdict)]
    size = Path(sys.argv[1] + "-wal").stat().st_size
    for room in (size + 7000, size + 2500, 1000):  # the file has room for a part of an entry; nothing has any room
        limit(room)
        ids.append(log.write(verdict))
        limit(hard)
        after = [log.write(verdict), log.write(verdict)]
        assert None not in after
        ids += after
    assert ids[-3] is None
    assert log.failures == ids.count(None)
    print(*filter(None, ids))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are POSIX's")
def test_a_full_disk_costs_ids_and_no_answers(tmp_path: Path) -> None:
    """Also in the middle of an entry; with room again, there are ids again."""
    command = [sys.executable, "-c", FILLED, str(tmp_path / "log.db")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "could not be written down" in found.stderr
    assert set(rows(tmp_path / "log.db")) == set(found.stdout.split())


def test_pages_and_forgetting(tmp_path: Path) -> None:
    with DecisionLog(tmp_path / "log.db") as log:
        ids = [str(log.write(verdict(action=action))) for action in ("answer", "abstain", "answer")]
        log.feedback(ids[0], right=True)
        log.flush()
        read: Callable[..., Any] = log.database.decisions
        assert [decision.id for decision, _ in read(limit=2)] == [ids[2], ids[1]]
        assert [decision.id for decision, _ in read(before=ids[1])] == [ids[0]]
        assert [decision.id for decision, _ in read(action="abstain")] == [ids[1]]
        assert read(since=datetime.now(UTC) + timedelta(days=1)) == []
        assert read(before="nothing") == []
        with pytest.raises(InputError, match="no decision"):
            log.feedback("dec_nothing", right=True)
        assert log.database.forget(datetime.now(UTC) + timedelta(seconds=1)) == 3
        assert read() == []


def test_times() -> None:
    now = datetime(2026, 11, 22, 12, tzinfo=UTC)
    assert parse_since("7d", now=now) == now - timedelta(days=7)
    assert parse_since("30m", now=now) == now - timedelta(minutes=30)
    assert parse_since("2026-11-01") == datetime(2026, 11, 1, tzinfo=UTC)
    for bad in ("", "7", "９d", "yesterday", "999999w", "-1d"):
        with pytest.raises(InputError, match="is not a time"):
            parse_since(bad, now=now)


@pytest.mark.parametrize(
    "edit",
    ["action = 'maybe'", "at = 1e300", "sentences = '{'", "sentences = x'ff'", "uncertainty = 'low'", "model = NULL"],
)
def test_an_edited_row_is_named(tmp_path: Path, edit: str) -> None:
    """SQLite keeps any value in any column."""
    path = tmp_path / "log.db"
    with DecisionLog(path) as log:
        name = log.write(verdict())
    connection = sqlite3.connect(path)
    with connection:
        connection.execute(f"update semgrad_guard_decisions set {edit}")  # noqa: S608
    connection.close()
    with pytest.raises(DecisionLogError, match="was it edited") as error:
        rows(path)
    assert "sentences" in edit or str(name) in str(error.value)


def test_what_cannot_be_a_log(tmp_path: Path) -> None:
    for url in ("nonsense://x", "postgresql+nodriver://host/x", "mysql+pymysql://host/x", "://"):
        with pytest.raises(InputError, match="is no decision log"):
            DecisionLog(url, journal=tmp_path / "journal")
    (tmp_path / "file").write_text("")
    with pytest.raises(DecisionLogError, match=r"cannot be kept"):
        DecisionLog(tmp_path / "log.db", journal=tmp_path / "file" / "x")


@pytest.mark.skipif(os.name != "posix", reason="rights of groups and others")
@pytest.mark.parametrize("spelled", ["{}", "sqlite:///{}", "sqlite:///file:{}?uri=true"])
@pytest.mark.parametrize("known", [False, True], ids=["new", "with wider rights"])
def test_a_log_is_its_owners_alone(tmp_path: Path, spelled: str, known: bool) -> None:
    path, journal = tmp_path / "log.db", tmp_path / "journal"
    if known:
        with DecisionLog(path, journal=journal) as log:
            log.write(verdict())
            with locked(path):
                log.write(verdict())
        for file in (path, journal, journal / "journal.db"):
            file.chmod(0o777)
    with DecisionLog(spelled.format(path), journal=journal) as log:
        log.write(verdict())
        with locked(path):
            log.write(verdict())
            modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.rglob("*")}
    assert {"log.db", "log.db-wal", "log.db-shm", "journal", "journal.db", "journal.db-wal"} <= set(modes)
    assert not {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


def test_a_folder_with_other_files_keeps_its_rights(tmp_path: Path) -> None:
    (tmp_path / "of another program").write_text("x")
    tmp_path.chmod(0o755)
    with DecisionLog(tmp_path / "log.db", journal=tmp_path) as log:
        log.write(verdict())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


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
