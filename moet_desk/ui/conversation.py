"""The open chat: its messages, the answer being written, the waiting message, and their storage.

It decides what is sent and when something is saved; it draws nothing. While an answer is written
its text is saved every second, so a killed process loses at most that. UI thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from moet_desk.engine.handle import GenerateRequest
from moet_desk.errors import MoetError
from moet_desk.marked_text import MarkedText
from moet_desk.telemetry import FinishReason
from moet_desk.ui.attachments import Attachment
from moet_desk.ui.branches import Tree
from moet_desk.ui.bridge import Bridge, Phase
from moet_desk.ui.chat_records import (
    ChatStoreLike,
    Draft,
    Pulled,
    Sent,
    Status,
    StoredChat,
    Turn,
    Wishes,
    turn_of,
)
from moet_desk.ui.chat_request import figures_of, request_of
from moet_desk.ui.live_answer import LiveAnswer
from moet_desk.ui.text import clean_line

SAVE_PERIOD_S = 1.0
SAVE_AGAIN_S = 5.0
TITLE_CHARS = 60


class Conversation:
    """The open chat. See the module's paragraph."""

    def __init__(self, bridge: Bridge, chats: ChatStoreLike, *, wishes: Wishes) -> None:
        self._bridge = bridge
        self._chats = chats
        self._saved_s = 0.0
        self._saved_chars = 0
        self._unsaved: dict[int, tuple[int | None, Turn]] = {}  # id -> chat and answer
        self._tried_s = 0.0
        self._new_draft = Draft()  # of the chat that is not stored yet
        self._opened_draft = Draft()
        self._takes_new_draft = False  # the open chat's first message is the draft of a new one
        self._stopping = False
        self._wishes_of_new = wishes
        self._tree = Tree()
        self.wishes = wishes
        self.chat_id: int | None = None
        self.turns: list[Turn] = []  # of the branch that is shown
        self.forgotten = 0  # turns at the beginning that are not sent any more
        self.queued: Draft | None = None
        self.live: LiveAnswer | None = None
        self.problem: MoetError | None = None  # of the last answer
        self.store_problem: MoetError | None = None  # saving failed; the chat goes on in memory
        self.context_used = 0
        self._guard(self._read_new_draft)

    # -- chats ---------------------------------------------------------------------------------

    def new(self) -> None:
        """Leave this chat (its answer is stopped and kept) and begin an empty one."""
        self._leave()
        self._reset()

    def open(self, chat_id: int) -> None:
        """Leave this chat and open a stored one; answers a crash cut off count as stopped.

        Raises:
            MoetError: it is not there or cannot be read; the open chat stays.
        """
        self.save_again()
        chat = self._chats.get_chat(chat_id)
        self._leave()
        self._reset()
        self.chat_id = chat.id
        files = tuple(map(Attachment.from_stored, chat.draft_files))
        self._opened_draft = Draft(chat.draft, files)
        self.wishes = self.wishes.with_stored(chat.settings, system=chat.system)
        self._tree = Tree(map(turn_of, chat.messages))
        self._show_path(chat.tip)

    def _show_path(self, tip: int | None) -> None:
        self.turns = self._tree.path_to(tip)
        self.forgotten = 0
        self.problem = None
        self.context_used = next(
            (int(t.meta["context_used"]) for t in self.turns[::-1] if "context_used" in t.meta), 0
        )

    def _reset(self) -> None:
        self.chat_id, self._takes_new_draft = None, False
        self._tree = Tree()
        self._show_path(None)
        self.wishes = self._wishes_of_new

    def _leave(self) -> None:
        self.queued = None
        if self.live is not None:
            self.live.stop()
            self.live.pull()
            self._end(Status.STOPPED)

    def delete(self, chat_id: int) -> None:
        """Delete a stored chat; if it is open, a new one is begun."""
        if chat_id == self.chat_id:
            self.new()
        self._chats.delete_chat(chat_id)
        self._unsaved = {k: kept for k, kept in self._unsaved.items() if kept[0] != chat_id}

    def list_chats(self, query: str, *, limit: int = 200) -> Sequence[tuple[StoredChat, str]]:
        """Stored chats, newest first, that contain `query`, each with a stretch of its text."""
        chats = self._chats.list_chats(limit, query)
        found = self._chats.excerpts(query, [chat.id for chat in chats])
        return [(chat, found.get(chat.id, "")) for chat in chats]

    @property
    def draft(self) -> Draft:
        """The unsent prompt that the open chat had when it was opened."""
        return self._new_draft if self.chat_id is None else self._opened_draft

    def _read_new_draft(self) -> None:
        text, files = self._chats.new_draft()
        self._new_draft = Draft(text, tuple(map(Attachment.from_stored, files)))

    def save_draft(self, text: str, files: tuple[Attachment, ...] = ()) -> None:
        """Keep an unsent prompt and its files with its chat."""
        draft, before, chat_id = Draft(text, files), self.draft, self.chat_id
        if chat_id is None:
            self._new_draft = draft
        else:
            self._opened_draft = draft
        if text != before.text:
            self._guard(lambda: self._chats.save_draft(chat_id, text))
        if files != before.files:  # they may be megabytes
            stored = [file.to_stored() for file in files]
            self._guard(lambda: self._chats.save_draft_files(chat_id, stored))

    def wish(self, **changes: Any) -> None:
        """Change how the next answers of this chat are asked for; names are fields of `Wishes`.

        A quality is meant for new chats as well: it is chosen for the model and the computer.
        """
        self.wishes = replace(self.wishes, **changes)
        if "quality" in changes:
            self._wishes_of_new = replace(self._wishes_of_new, quality=changes["quality"])
        if self.chat_id is not None:
            chat_id, wishes = self.chat_id, self.wishes
            self._guard(
                lambda: self._chats.save_settings(
                    chat_id, system=wishes.system, settings=wishes.to_stored()
                )
            )

    def wish_for_new(self, wishes: Wishes) -> None:
        """Change how answers are asked for in new chats, and in this one if nothing was sent."""
        if self.wishes == self._wishes_of_new and self.chat_id is None:
            self.wishes = wishes
        self._wishes_of_new = wishes

    # -- branches ------------------------------------------------------------------------------

    @property
    def all_turns(self) -> Sequence[Turn]:
        """The messages of all branches, in the order in which they came."""
        return self._tree.turns

    def branch_of(self, turn: Turn) -> tuple[int, int]:
        """Which of how many messages at the same place this is, from 1."""
        siblings = self._tree.siblings(turn)
        return siblings.index(turn.id) + 1, len(siblings)

    def move(self, turn: Turn, by: int) -> bool:
        """Show the branch of the sibling `by` further on. False: there is none, or an answer is
        being written.
        """
        siblings = self._tree.siblings(turn)
        at = siblings.index(turn.id) + by
        if self.busy or not 0 <= at < len(siblings):
            return False
        self.go_to(siblings[at])
        return True

    def go_to(self, turn_id: int) -> bool:
        """Show the branch that a message is in. False: an answer is being written elsewhere."""
        if any(turn.id == turn_id for turn in self.turns):
            return True
        if self.busy or self.chat_id is None or turn_id not in self._tree:
            return False
        self._show_path(self._tree.end_of(turn_id))
        chat_id, tip = self.chat_id, self.turns[-1].id
        self._guard(lambda: self._chats.set_tip(chat_id, tip))
        return True

    def edit(self, turn: Turn, draft: Draft) -> bool:
        """Send a message of the user again in other words, on a branch of its own, wherever the
        message is. False: an answer is being written, or no model is ready.

        Raises:
            MoetError: the store cannot take it; nothing was sent.
        """
        if self.busy or self._bridge.phase is not Phase.READY or turn.id not in self._tree:
            return False
        before = self._tree.path_to(turn.id)[:-1]
        with self._branching(before, asked_at=len(before)):
            self._start(draft)
        return True

    @contextmanager
    def _branching(self, turns: list[Turn], *, asked_at: int) -> Iterator[None]:
        """What is added goes on from these; the branch comes back if the store cannot take it.

        Args:
            turns: where it goes on.
            asked_at: where the message is that is answered; what is left out may not reach it.
        """
        kept = self.turns, self.forgotten
        self.turns = turns
        if self.forgotten > asked_at:
            self.forgotten = 0
        try:
            yield
        except MoetError:
            self.turns, self.forgotten = kept
            raise

    # -- sending -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an answer is being made."""
        return self.live is not None

    def send(self, text: str, files: tuple[Attachment, ...] = ()) -> Sent:
        """Send a message now, or queue it behind the answer or the loading.

        Raises:
            MoetError: the store cannot take it; nothing was sent.
        """
        if not self.busy and self._bridge.phase is Phase.READY:
            self._start(Draft(text, files))
            return Sent.STARTED
        if self.queued is not None:
            return Sent.REFUSED
        self.queued = Draft(text, files)
        return Sent.QUEUED

    def take_queued(self) -> Draft | None:
        """Send the waiting message if it can go now; returns it."""
        ready = self.queued is not None and not self.busy and self._bridge.phase is Phase.READY
        if not ready or self.queued is None:
            return None
        draft, self.queued = self.queued, None
        self._start(draft)
        return draft

    def unqueue(self) -> Draft | None:
        """Take the waiting message back; returns it."""
        draft, self.queued = self.queued, None
        return draft

    def _start(self, draft: Draft) -> None:
        if self.chat_id is None:
            names = ", ".join(file.name for file in draft.files)
            self.chat_id = self._chats.create_chat(
                clean_line(draft.text.strip() or names, TITLE_CHARS),
                model=self._bridge.snapshot().model,
                system=self.wishes.system,
                settings=self.wishes.to_stored(),
            )
            self._takes_new_draft, self._opened_draft = True, Draft()
        self._add("user", draft, Status.DONE)
        if self._takes_new_draft:  # what was its draft is a message now
            self._takes_new_draft = False
            self._guard(lambda: self._chats.save_draft(None, ""))
            self._guard(lambda: self._chats.save_draft_files(None, []))
            self._new_draft = Draft()
        self._answer()

    def _add(self, role: str, draft: Draft, status: Status) -> Turn:
        if self.chat_id is None:
            raise RuntimeError("no chat is open")
        parent = self.turns[-1].id if self.turns else None
        files = [file.to_stored() for file in draft.files]
        message_id = self._chats.add_message(
            self.chat_id, role, draft.text, status=status.value, parent=parent, files=files
        )
        turn = Turn(
            message_id, role, draft.text, status, self._bridge.clock.wall(),
            parent=parent, files=draft.files,
        )  # fmt: skip
        self._tree.add(turn)
        self.turns.append(turn)
        return turn

    def _answer(self) -> None:
        request = self.request()
        self._add("assistant", Draft(), Status.WRITING)
        self.problem = None
        self._stopping = False
        self._saved_s = self._bridge.clock.monotonic()
        self._saved_chars = 0
        try:
            self.live = self._bridge.submit(request)
        except MoetError as error:
            self._end_with(Status.FAILED, "", error)

    def request(self) -> GenerateRequest:
        """The request for an answer to the turns so far."""
        return request_of(self.turns[self.forgotten :], self.wishes, self._bridge.model())

    def retry(self, turn: Turn | None = None) -> bool:
        """Answer a message again, by default the last one; the old answer stays as a sibling.

        Args:
            turn: an answer, or a message of the user, of the branch that is shown.

        Returns:
            False: there is nothing to answer, no model, or an answer is being written.
        """
        if self.busy or self._bridge.phase is not Phase.READY or not self.turns:
            return False
        if turn is not None and turn not in self.turns:
            return False
        at = len(self.turns) - 1 if turn is None else self.turns.index(turn)
        end = at if self.turns[at].role == "assistant" else at + 1
        if end == 0 or self.turns[end - 1].role != "user":
            return False
        with self._branching(self.turns[:end], asked_at=end - 1):
            self._answer()
        return True

    def forget_oldest(self) -> int:
        """Leave the older half of the turns out of what is sent; returns how many."""
        kept = self.turns[self.forgotten :]
        middle = len(kept) // 2
        starts = [i for i, turn in enumerate(kept) if turn.role == "user" and i > 0]
        after = next((i for i in starts if i >= middle), starts[-1] if starts else 0)
        self.forgotten += after
        return after

    # -- the answer ----------------------------------------------------------------------------

    def stop(self) -> bool:
        """Stop the answer; its text is kept. False: none is being written."""
        if self.live is None:
            return False
        self._stopping = True
        self.live.stop()
        return True

    def pull(self) -> Pulled:
        """Take new text, save it when it is time, and end the answer when it has ended."""
        live = self.live
        if live is None:
            return Pulled(MarkedText(), ended=False)
        thought, text = live.pull()
        turn = self.turns[-1]
        turn.text, turn.marks, turn.thought = live.text.text, live.text.marks, live.thought
        if live.thought_s is not None:
            turn.meta |= {"thought_s": live.thought_s, "thought_tokens": live.thought_tokens}
        if live.ended:
            self._end(self._status_of(live))
            return Pulled(text, ended=True, thought=thought)
        now_s, n_chars = self._bridge.clock.monotonic(), len(turn.text) + len(turn.thought)
        if now_s - self._saved_s >= SAVE_PERIOD_S and n_chars > self._saved_chars:
            self._saved_s, self._saved_chars = now_s, n_chars
            self._save(turn)
        return Pulled(text, ended=False, thought=thought)

    def _status_of(self, live: LiveAnswer) -> Status:
        if live.error is not None:
            return Status.FAILED
        cancelled = live.finished is not None and live.finished.reason is FinishReason.CANCELLED
        return Status.STOPPED if cancelled or self._stopping else Status.DONE

    def _end(self, status: Status) -> None:
        live = self.live
        if live is None:
            return
        meta = self.turns[-1].meta
        if live.finished is not None:
            meta["reason"] = live.finished.reason.value
            meta["quality"] = live.finished.quality
        if live.usage is not None:
            self.context_used = live.usage.prompt_tokens + live.usage.completion_tokens
            meta |= figures_of(live.usage) | {"context_used": self.context_used}
        if server := self._bridge.snapshot().remote:
            meta["server"] = server
        self.turns[-1].marks, self.turns[-1].thought = live.text.marks, live.thought
        self._end_with(status, live.text.text, live.error)

    def _end_with(self, status: Status, text: str, error: MoetError | None) -> None:
        turn = self.turns[-1]
        turn.text, turn.status = text, status
        if error is not None:
            turn.meta["error"] = error.to_dict()
        if self.wishes.system:
            turn.meta["system"] = self.wishes.system  # it may be another one later
        self.problem = error
        self.live = None
        self._save(turn)

    def save_when_due(self) -> None:
        """Try again to save what could not be saved, now and then."""
        if self._unsaved and self._bridge.clock.monotonic() - self._tried_s >= SAVE_AGAIN_S:
            self.save_again()

    def save_again(self) -> None:
        """Save what could not be saved."""
        if self._unsaved:
            self._guard(self._save_all)

    def _save(self, turn: Turn) -> None:
        self._unsaved[turn.id] = (self.chat_id, turn)
        self.save_again()

    def _save_all(self) -> None:
        self._tried_s = self._bridge.clock.monotonic()
        for _, turn in tuple(self._unsaved.values()):
            self._chats.update_message(
                turn.id,
                content=turn.text,
                status=turn.status.value,
                meta=turn.meta,
                reasoning=turn.thought,
            )
            del self._unsaved[turn.id]

    def _guard(self, save: Callable[[], None]) -> None:
        """Save; a store that cannot (full disk) must not end the answer in front of the reader."""
        try:
            save()
        except MoetError as error:
            self.store_problem = error
        else:
            if not self._unsaved:
                self.store_problem = None

    def keep(self) -> None:
        """Stop the answer, and store what was written of it."""
        self._leave()
        self.save_again()

    def close(self) -> None:
        """The window closes: keep what was written and close the store."""
        self.keep()
        self._guard(self._chats.close)
