"""A few cases of bench/fuzz.py for all that is read, and what longer runs of it have found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.fuzz import TARGETS, run_target
from moet_desk import config
from moet_desk.cli.desk_jobs import AppJobs
from moet_desk.engine.families import plan_for
from moet_desk.errors import MoetError
from moet_desk.store.chats import ChatStore
from moet_desk.store.jobs import JobStore
from moet_desk.store.responses import Kept, ResponseStore
from moet_desk.ui.bridge import Bridge
from moet_desk.ui.chat_lines import closing_line
from moet_desk.ui.chat_records import Wishes
from moet_desk.ui.conversation import Conversation
from moet_desk.ui.theme import UNICODE
from tests.engine.tiny_models import TINY

CASES = {"safetensors": 30, "gguf": 20, "pack": 20, "journal": 3, "chats": 12,
         "responses": 10, "config": 30}  # fmt: skip
OTHERS = dict.fromkeys(("prefixes", "ndjson", "records", "model config", "eval texts"), 60)


@pytest.mark.parametrize(("name", "cases"), [*CASES.items(), *OTHERS.items()])
def test_damaged__catalogue_errors_and_nothing_else(name: str, cases: int) -> None:
    found = run_target(name, seed=1, cases=cases)
    assert found.failures == []
    assert found.cases == cases
    assert found.fine + found.codes.total() == cases


def test_targets__all_have_quick_cases() -> None:
    assert {*CASES, *OTHERS, "http"} == set(TARGETS)  # http: tests/api/test_fuzz.py


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_routed_experts"])
@pytest.mark.parametrize("count", [2**31, -(2**70), float("inf"), float("nan")])
def test_counts_that_no_model_has__refused_at_once(name: str, count: float) -> None:
    with pytest.raises(MoetError, match="MD-SRC-07"):
        plan_for({"model_type": "deepseek_v3", **TINY, name: count}, path="c", names=())


def test_job_of_another_name__is_not_followed_there(tmp_path: Path) -> None:
    record = {"id": "../../elsewhere", "kind": "pull", "model": "m", "arguments": []}
    (tmp_path / "pull-m.json").write_text(json.dumps(record))
    assert JobStore(tmp_path).jobs() == []
    (tmp_path / "pull-m.json").write_text(json.dumps({**record, "id": "pull-m"}))
    assert len(JobStore(tmp_path).jobs()) == 1


@pytest.mark.parametrize(
    "event",
    [
        {"event": "error", "error": {"code": ["MD-DISK-01"]}},
        {"event": "download", "done_bytes": 5},
        {"event": "download", "done_bytes": "x", "total_bytes": float("inf"), "files": 3},
        {"event": "pack", "unit": "rows", "done": -1, "total": None, "rate_bytes_per_s": [1]},
    ],
)
def test_torn_event__the_job_is_shown_all_the_same(
    tmp_path: Path, event: dict[str, object]
) -> None:
    record = {"id": "pull-m", "kind": "pull", "model": "m", "arguments": []}
    (tmp_path / "pull-m.json").write_text(json.dumps(record))
    (tmp_path / "pull-m.ndjson").write_text(json.dumps(event) + "\n" + "[" * 100_000 + "\n")
    [view] = AppJobs(tmp_path).views()
    assert view.id == "pull-m"
    assert all(0 <= step.done <= step.total or step.total == 0 for step in view.steps)


@pytest.mark.parametrize("text", ["endpoint = 5\n", 'endpoint = "x"\n', "endpoint = [1]\n"])
def test_group_that_is_no_table__other_settings_can_be_saved(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    config.save_setting(path, "ui.theme", "moet-light")
    assert path.read_text().startswith(text)
    with pytest.raises(MoetError, match="MD-CFG-03"):
        config.save_setting(path, "answers.system", "half \ud800 of a character")
    with pytest.raises(MoetError, match="MD-CFG-03"):
        config.save_setting(path, "endpoint.aliases", ["\ud800"])


def test_response_of_another_type__counts_as_gone(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "r.sqlite3")
    store.put("a", Kept([], {"id": "a"}))
    store._file.execute("UPDATE responses SET record = 'text'")
    assert store.get("a") is None
    store.close()


def test_values_that_nobody_wrote__the_chat_opens_all_the_same(tmp_path: Path) -> None:
    store = ChatStore.open(tmp_path / "chats.sqlite3")
    chat = store.create_chat("A title", model="demo")
    first = store.add_message(chat, "user", "What was said.", status="done")
    second = store.add_message(chat, "assistant", "The answer.", status="done", parent=first)
    junk = (
        f"UPDATE messages SET parent = {second} WHERE id = {first}",  # a circle
        "UPDATE messages SET status = 'x', meta = '[1', files = '[{}, 3]', created = 'never'",
        "UPDATE chats SET settings = '{\"seed\": [], \"top_k\": 2.0}', draft_files = '5'",
        "UPDATE chats SET created = 1e300, updated = NULL WHERE 0",
    )
    for change in junk:
        store._connection.execute(change)
    conversation = Conversation(Bridge(None), store, wishes=Wishes())
    conversation.open(chat)
    assert [turn.text for turn in conversation.turns] == ["What was said.", "The answer."]
    assert conversation.turns[0].files[0].name == "?"
    assert conversation.wishes.top_k == 2
    assert conversation.wishes.seed is None
    assert closing_line(conversation.turns[1], UNICODE).plain == "stopped"
    store.close()


def test_version_below_zero__not_our_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    store = ChatStore.open(path)
    store._connection.execute("PRAGMA user_version = -1")
    store.close()
    with pytest.raises(MoetError, match="MD-CHAT-02"):
        ChatStore.open(path)
