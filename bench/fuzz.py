"""Damages everything this program reads and looks what it says: catalogue errors, and nothing else.

    python -m bench.fuzz --seconds N [--only NAME] [--seed N] [--record FILE]

One JSON object. Each case is a copy of something good, with bytes or values damaged, read by what reads
it in earnest. It may work, or end with an error of the catalogue. Any other exception, an answer from
damaged bytes where they have checksums, and more than ten seconds are failures. Cases depend on the seed
alone, so a failure can be played again.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from moet_desk import config
from moet_desk.cli.desk_jobs import AppJobs
from moet_desk.cli.eval_data import read_tasks, read_texts
from moet_desk.engine.families import plan_for, spec_for
from moet_desk.engine.gate_file import gate_in_use
from moet_desk.errors import MoetError, fail
from moet_desk.settings import SETTINGS
from moet_desk.store.chats import ChatStore
from moet_desk.store.journal import JournalKey, read_journal
from moet_desk.store.library import look_at
from moet_desk.store.model_source import ModelSource
from moet_desk.store.pack_format import Plane
from moet_desk.store.pack_reader import PackReader
from moet_desk.store.pack_verify import verify_pack
from moet_desk.store.pack_writer import write_pack
from moet_desk.store.pull_state import read_origin, read_state
from moet_desk.store.quant_formats import decode
from moet_desk.store.responses import Kept, ResponseStore
from moet_desk.store.saved_prefixes import SavedPrefixes
from moet_desk.store.state_file import read_record
from moet_desk.ui.bridge import Bridge
from moet_desk.ui.chat_lines import closing_line
from moet_desk.ui.chat_records import Wishes
from moet_desk.ui.conversation import Conversation
from moet_desk.ui.setup_steps import from_kept
from moet_desk.ui.theme import UNICODE
from moet_desk.ui.widgets.problem import problem_content
from tests.engine.tiny_models import CONFIGS
from tests.store.tiny import Tiny, plan_of, write_source

HANG_S = 10.0
TINY = Tiny(hidden=64, inter=32, n_experts=2, layers=(1,))
JUNK: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**70), 1e308, float("inf"), float("nan"), 0.5, "",
    "x", "\x00", "é\ud800", "../../x", "9" * 400, [], {}, [[]], [None], {"": None}, [1, 2, 3],
    {"a": {"b": []}},
)  # fmt: skip


class Hang(BaseException):
    """A case took longer than it may."""


@dataclass
class Found:
    """What the cases of one target gave."""

    cases: int = 0
    fine: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)


# -- damage ------------------------------------------------------------------------------------


def damaged(choose: random.Random, data: bytes) -> bytes:
    """Bytes with some of them changed, left out, doubled or added."""
    out = bytearray(data)
    for _ in range(choose.choice((1, 1, 1, 2, 5))):
        at = choose.randrange(len(out) + 1)
        n = min(len(out) - at, choose.choice((1, 1, 2, 4, 8, 64)))
        match choose.randrange(8):
            case 0 | 1 if at < len(out):
                out[at] ^= 1 << choose.randrange(8)
            case 2:
                out[at : at + n] = choose.randbytes(n)
            case 3:
                out[at : at + n] = choose.choice((b"\x00", b"\xff", b"\x7f")) * n
            case 4:
                del out[at:]
            case 5:
                del out[at : at + n]
            case 6:
                out[at:at] = out[at : at + n]
            case _:
                out[at:at] = choose.randbytes(n)
    return bytes(out)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(inner):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def changed(choose: random.Random, value: Any) -> Any:
    """A JSON value with some of its parts replaced, left out or added."""
    whole = [copy.deepcopy(value)]
    for _ in range(choose.choice((1, 1, 2, 4))):
        spots = list(_places(whole))
        container, key = choose.choice(spots)
        if choose.random() < 0.2 and container is not whole:
            del container[key]
        elif choose.random() < 0.1 and isinstance(container, list):
            container.insert(key, copy.deepcopy(choose.choice(JUNK)))
        else:
            container[key] = copy.deepcopy(choose.choice(JUNK))
    return whole[0]


def damage_json(choose: random.Random, data: bytes) -> bytes:
    """A JSON text with other values, or with damaged bytes."""
    if choose.random() < 0.4:
        return damaged(choose, data)
    return json.dumps(changed(choose, json.loads(data))).encode("utf-8", "surrogatepass")


def damage_lines(choose: random.Random, data: bytes) -> bytes:
    """JSON lines of which one has other values, or damaged bytes."""
    lines = data.splitlines(keepends=True)
    at = choose.randrange(len(lines))
    lines[at] = damage_json(choose, lines[at])
    return b"".join(lines) if choose.random() < 0.8 else damaged(choose, b"".join(lines))


def _damage_file(choose: random.Random, path: Path) -> None:
    data = path.read_bytes()
    if path.suffix == ".json" and data[:1] in b"{[":
        path.write_bytes(damage_json(choose, data))
    else:
        path.write_bytes(damaged(choose, data))


# -- what is read -----------------------------------------------------------------------------------
# A target makes something good in a folder, once; then it plays cases on copies of that folder.


class Target:
    """See the comment above."""

    def make(self, folder: Path) -> None:
        """Put something good into a folder."""

    def play(self, folder: Path, choose: random.Random) -> None:
        """Damage it and read it."""
        raise NotImplementedError


class Safetensors(Target):
    def make(self, folder: Path) -> None:
        write_source(folder / "source", TINY, "bf16", shards=2)

    def play(self, folder: Path, choose: random.Random) -> None:
        source = folder / "source"
        path = choose.choice(sorted(source.iterdir()))
        if path.suffix == ".safetensors" and choose.random() < 0.8:
            data = path.read_bytes()
            size = int.from_bytes(data[:8], "little")
            header = damage_json(choose, data[8 : 8 + size])
            length = len(header).to_bytes(8, "little")
            path.write_bytes(
                (data[:8] if choose.random() < 0.3 else length) + header + data[8 + size :]
            )
        else:
            _damage_file(choose, path)
        opened = ModelSource.open(source)
        for name in opened.index.names():
            decode(opened.index, name)


class Gguf(Target):
    def make(self, folder: Path) -> None:
        from tests.store.gguf_files import random_tensors, write_gguf
        from tests.store.test_gguf import CONFIG

        write_gguf(folder / "m.gguf", random_tensors(CONFIG), CONFIG, experts="Q4_0")

    def play(self, folder: Path, choose: random.Random) -> None:
        path = folder / "m.gguf"
        data = path.read_bytes()
        head = choose.choice((256, 4096, 16384, len(data)))  # most of a file is weights
        path.write_bytes(damaged(choose, data[:head]) + data[head:])
        opened = ModelSource.open(path)
        for name in opened.index.names()[:8]:
            decode(opened.index, name)
        plan_for(opened.config, path=opened.config_path, names=opened.index.names())


class Pack(Target):
    """Rows of a damaged pack are read as they were, or not at all."""

    def make(self, folder: Path) -> None:
        write_source(folder / "source", TINY)
        write_pack(folder / "source", plan_of(TINY, folder / "source"), folder / "pack")
        shutil.rmtree(folder / "source")
        self.rows = _rows(folder / "pack")

    def play(self, folder: Path, choose: random.Random) -> None:
        pack = folder / "pack"
        path = choose.choice(sorted(path for path in pack.iterdir() if path.stat().st_size))
        before = path.read_bytes()
        _damage_file(choose, path)
        look_at(pack)
        gate_in_use(pack, None)
        report = verify_pack(pack, threads=1)
        assert _rows(pack) == self.rows, "other rows than before"
        if path.name != "pack.json" and path.read_bytes() != before:
            assert not report.ok, f"damage in {path.name} is not found"


def _rows(pack: Path) -> list[bytes]:
    rows = []
    with PackReader.open(pack) as reader:
        for name in reader.dense.names():
            decode(reader.dense, name)
        for plane in Plane:
            out = bytearray(reader.meta.stride(plane))
            for row in range(reader.meta.n_rows):
                reader.read_row(plane, row, out)
                rows.append(bytes(out))
    return rows


class Journal(Target):
    """An unfinished pack goes on, whatever became of its journal, and is the same in the end."""

    def make(self, folder: Path) -> None:
        source = folder / "source"
        write_source(source, TINY)
        self.plan = plan_of(TINY, source)
        write_pack(source, self.plan, folder / "whole")
        self.bytes = {path.name: path.read_bytes() for path in (folder / "whole").glob("experts.*")}
        shutil.rmtree(folder / "whole")
        journal = folder / "pack" / "journal"

        def has_begun() -> bool:
            return journal.exists() and journal.stat().st_size > 64

        try:
            write_pack(source, self.plan, folder / "pack", stop=has_begun)
        except MoetError as error:
            if error.code != "MD-PACK-06":
                raise
        assert has_begun()

    def play(self, folder: Path, choose: random.Random) -> None:
        pack = folder / "pack"
        path = pack / "journal"
        path.write_bytes(damaged(choose, path.read_bytes()))
        read_journal(path, key=JournalKey.of("00" * 32, self.plan))
        look_at(pack)
        write_pack(folder / "source", self.plan, pack)
        for name, data in self.bytes.items():
            assert (pack / name).read_bytes() == data, f"{name} differs"


class Chats(Target):
    """The chats' file, with damaged pages or with values that this program never writes."""

    def make(self, folder: Path) -> None:
        store = ChatStore.open(folder / "chats.sqlite3")
        for number in range(3):
            chat = store.create_chat(f"Chat {number}", model="demo", system="Be brief.")
            store.add_message(chat, "user", "word " * 50, status="done")
            message = store.add_message(chat, "assistant", "", status="writing")
            meta = {
                "tokens": 5,
                "decode_s": 0.1,
                "context_used": 9,
                "error": fail("MD-ENG-04").to_dict(),
            }
            store.update_message(message, content="answer " * 50, status="done", meta=meta)
            store.save_settings(chat, system="Be brief.", settings=Wishes(seed=1).to_stored())
            store.save_draft_files(chat, [{"name": "a.txt", "text": "file", "n_tokens": 1}])
        store.close()

    def play(self, folder: Path, choose: random.Random) -> None:
        path = folder / "chats.sqlite3"
        if choose.random() < 0.5:
            path.write_bytes(damaged(choose, path.read_bytes()))
        else:
            _junk_in_a_row(path, choose)
        store = ChatStore.open(path)
        try:
            conversation = Conversation(Bridge(None), store, wishes=Wishes())
            for chat, _ in conversation.list_chats(""):
                conversation.open(chat.id)
                for turn in conversation.turns:
                    closing_line(turn, UNICODE)
                    if "error" in turn.meta:
                        problem_content(turn.meta["error"], UNICODE)
                conversation.request()
            conversation.list_chats("answer")
            chat_id = store.create_chat("new")
            store.add_message(chat_id, "user", "hi", status="done")
            store.save_draft(chat_id, "draft")
            store.delete_chat(chat_id)
        finally:
            store.close()


def _junk_in_a_row(path: Path, choose: random.Random) -> None:
    """A value that this program never writes, in a column; JSON columns also get other values."""
    values = [None, 0, -1, 1e300, "x", "", b"\xff", "{", "[]", '{"a": 1', "NaN", 2**62]
    file = sqlite3.connect(path)
    tables = [row[0] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    own = [name for name in tables if not name.startswith(("sqlite", "message_words"))]
    table = choose.choice(own)
    column = choose.choice([row[1] for row in file.execute(f"PRAGMA table_info({table})")])
    value = choose.choice(values)
    old = file.execute(f"SELECT {column} FROM {table} ORDER BY length({column}) DESC").fetchone()[0]
    if isinstance(old, str) and old[:1] in ("{", "[") and choose.random() < 0.7:
        value = json.dumps(changed(choose, json.loads(old)))
    try:
        with file:
            file.execute("PRAGMA foreign_keys = OFF")
            file.execute(f"UPDATE {table} SET {column} = ?", (value,))
            if choose.random() < 0.1:
                file.execute(f"PRAGMA user_version = {choose.randrange(-5, 50)}")
    except sqlite3.Error:
        pass  # the file itself does not take such a value
    file.close()


class Responses(Target):
    def make(self, folder: Path) -> None:
        store = ResponseStore(folder / "responses.sqlite3")
        for number in range(4):
            messages = [{"role": "user", "content": "hi " * 100}]
            store.put(f"resp_{number}", Kept(messages, {"id": f"resp_{number}"}))
        store.close()

    def play(self, folder: Path, choose: random.Random) -> None:
        path = folder / "responses.sqlite3"
        if choose.random() < 0.6:
            path.write_bytes(damaged(choose, path.read_bytes()))
        else:
            _junk_in_a_row(path, choose)
        store = ResponseStore(path)
        for number in range(4):
            kept = store.get(f"resp_{number}")
            assert kept is None or isinstance(kept.body, dict), kept
        store.put("resp_9", Kept([], {"id": "resp_9"}))
        store.delete("resp_1")
        store.close()


class Prefixes(Target):
    """Kept prompts come back as they were, or not at all."""

    BODY = np.arange(5000, dtype=np.uint8)

    def make(self, folder: Path) -> None:
        saved = SavedPrefixes(folder / "prefixes", n_bytes=10**6)
        saved.write(b"key", self.BODY)
        saved.close()

    def play(self, folder: Path, choose: random.Random) -> None:
        [path] = (folder / "prefixes").iterdir()
        path.write_bytes(damaged(choose, path.read_bytes()))
        saved = SavedPrefixes(folder / "prefixes", n_bytes=10**6)
        back = saved.read(b"key")
        assert back is None or np.array_equal(back, self.BODY), "other bytes than before"
        saved.close()


class Config(Target):
    TEXT = (
        '# mine\n[ui]\ntheme = "moet-light"  # kept\ncolor = "never"\n[memory]\ncontext = 4096\n'
        'ram = "2GiB"\n[endpoint]\nport = 11500\nhosts = ["a", "b"]\n[keys]\n"chat.new" = "ctrl+n"\n'
    )

    def play(self, folder: Path, choose: random.Random) -> None:
        path = folder / "config.toml"
        if choose.random() < 0.5:
            path.write_bytes(damaged(choose, self.TEXT.encode()))
        else:
            path.write_text(_toml(changed(choose, tomllib.loads(self.TEXT))), "utf-8", "replace")
        name = choose.choice(list(SETTINGS))
        junk = choose.choice(JUNK)
        variables = {SETTINGS[name].variable: str(junk)} if choose.random() < 0.3 else {}
        try:
            config.load(path, environment=variables)
        except MoetError:
            config.save_setting(path, "ui.theme", "moet-dark")
            raise
        config.save_setting(path, name, junk)


def _toml(value: Any) -> str:
    lines = []
    for group, table in value.items() if isinstance(value, dict) else [("x", value)]:
        if isinstance(table, dict):
            lines.append(f"[{json.dumps(group)}]")
            lines += [f"{json.dumps(name)} = {_scalar(inner)}" for name, inner in table.items()]
        else:
            lines.insert(0, f"{json.dumps(group)} = {_scalar(table)}")
    return "\n".join(lines)


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return {"Infinity": "inf", "NaN": "nan"}.get(json.dumps(value), json.dumps(value))
    return "[]" if value is None or isinstance(value, dict) else json.dumps(value)


class Jobs(Target):
    """Events of child processes (NDJSON), and the record of a job."""

    def make(self, folder: Path) -> None:
        record = {"id": "pull-m", "kind": "pull", "model": "m", "arguments": ["pull", "m"]}
        (folder / "pull-m.json").write_text(json.dumps(record))
        events: list[dict[str, Any]] = [
            {"event": "started"},
            {"event": "download", "done_bytes": 5, "total_bytes": 10, "rate_bytes_per_s": 2.5,
             "files": 3, "files_done": 1},
            {"event": "pack", "done": 5, "total": 10, "unit": "rows", "bytes": 99,
             "rate_bytes_per_s": 2.5, "trouble": "slow"},
            {"event": "error", "error": {"code": "MD-DISK-01", "need": "1 GB", "path": "p"}},
        ]  # fmt: skip
        (folder / "pull-m.ndjson").write_text("".join(json.dumps(e) + "\n" for e in events))

    def play(self, folder: Path, choose: random.Random) -> None:
        path = folder / choose.choice(("pull-m.ndjson", "pull-m.ndjson", "pull-m.json"))
        path.write_bytes(damage_lines(choose, path.read_bytes()))
        jobs = AppJobs(folder)
        for view in jobs.views():
            step = view.step
            assert step is None or step.total >= 0


class Records(Target):
    """Small JSON records: the wizard's, a download's, a pack's origin."""

    def make(self, folder: Path) -> None:
        (folder / ".pull").mkdir()
        file = {"name": "model.safetensors", "size": 9, "sha256": "00", "git_sha1": ""}
        state = {"format": 1, "repo": "a/b", "revision": "", "commit": "c", "files": [file]}
        (folder / ".pull" / "state.json").write_text(json.dumps({**state, "landed": {"x": "y"}}))
        (folder / "origin.json").write_text(json.dumps(state))
        wizard = {
            "step": 3, "first": 1, "offer": "demo", "job": "pull-m", "model": "m", "open": True,
            "wishes": {"context": 4096, "keep_free": 5, "quality": "fast", "ram": None},
        }  # fmt: skip
        (folder / "wizard.json").write_text(json.dumps(wizard))

    def play(self, folder: Path, choose: random.Random) -> None:
        names = (".pull/state.json", "origin.json", "wizard.json")
        path = folder / choose.choice(names)
        path.write_bytes(damage_json(choose, path.read_bytes()))
        from_kept(read_record(folder / "wizard.json"))
        read_state(folder)
        read_origin(folder)


class ModelConfigs(Target):
    """config.json of every family that runs."""

    def play(self, folder: Path, choose: random.Random) -> None:
        given = {"model_type": "deepseek_v3", **CONFIGS[choose.choice(list(CONFIGS))]}
        broken = changed(choose, given)
        if not isinstance(broken, dict):
            broken = {}
        spec_for(broken, path="config.json", has_mtp=choose.random() < 0.2)
        plan_for(broken, path="config.json", names=())


class Texts(Target):
    """What `eval` reads: JSON lines and plain texts."""

    def make(self, folder: Path) -> None:
        tasks = [
            {"question": "What is 2 + 2?", "answer": "4"},
            {"text": "<|user|>Hi<|end|><|assistant|>Hello<|end|>"},
        ]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks * 2))
        (folder / "texts.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')

    def play(self, folder: Path, choose: random.Random) -> None:
        name, read = choose.choice((("tasks.jsonl", read_tasks), ("texts.jsonl", read_texts)))
        path = folder / name
        path.write_bytes(damage_lines(choose, path.read_bytes()))
        read(path)


class Http(Target):
    """Bodies sent to the endpoint: see tests/api/test_fuzz.py."""

    def play(self, folder: Path, choose: random.Random) -> None:
        from tests.api.test_fuzz import run_mutations

        run_mutations(20, seed=choose.randrange(2**32))


TARGETS: dict[str, Callable[[], Target]] = {
    "safetensors": Safetensors,
    "gguf": Gguf,
    "pack": Pack,
    "journal": Journal,
    "chats": Chats,
    "responses": Responses,
    "prefixes": Prefixes,
    "config": Config,
    "ndjson": Jobs,
    "records": Records,
    "model config": ModelConfigs,
    "eval texts": Texts,
    "http": Http,
}


# -- playing ----------------------------------------------------------------------------------------


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the main thread when it takes longer."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_target(
    name: str, *, seed: int, seconds: float = float("inf"), cases: int | None = None
) -> Found:
    """Play cases of a target until the time or their number is over."""
    found = Found()
    target = TARGETS[name]()
    with tempfile.TemporaryDirectory() as root:
        good, case = Path(root) / "good", Path(root) / "case"
        good.mkdir()
        target.make(good)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s and (cases is None or found.cases < cases):
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(good, case)
            _play(target, case, f"{name}/{seed}/{found.cases}", found)
    return found


def _play(target: Target, case: Path, key: str, found: Found) -> None:
    found.cases += 1
    began_s = time.monotonic()
    try:
        with no_longer_than(HANG_S):
            target.play(case, random.Random(key))
        found.fine += 1
    except MoetError as error:
        found.codes[error.code] += 1
    except (Exception, Hang) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        what = f"{type(error).__name__}: {error}"[:300]
        found.failures.append({"case": key, "what": what, "where": where})
    found.slowest_s = max(found.slowest_s, time.monotonic() - began_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together")
    parser.add_argument("--only", choices=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="write the object there as well")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # what is dropped is said there, for every case
    names = [given.only] if given.only else list(TARGETS)
    targets = {}
    for name in names:
        found = run_target(name, seed=given.seed, seconds=given.seconds / len(names))
        targets[name] = {
            "cases": found.cases,
            "fine": found.fine,
            "errors": dict(found.codes.most_common()),
            "slowest_s": round(found.slowest_s, 3),
            "failures": found.failures[:20],
            "n_failures": len(found.failures),
        }
        print(f"{name}: {found.cases} cases, {len(found.failures)} failures", file=sys.stderr)
    record = {
        "what": "damaged files and bodies: errors of the catalogue, and nothing else",
        "date": datetime.now(UTC).date().isoformat(),
        "device": "cpu",
        "shape": "tiny",
        "seed": given.seed,
        "seconds": given.seconds,
        "cases": sum(target["cases"] for target in targets.values()),
        "failures": sum(target["n_failures"] for target in targets.values()),
        "targets": targets,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if given.record is not None:
        given.record.write_text(text + "\n")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
