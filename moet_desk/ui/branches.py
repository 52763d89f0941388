"""The messages of a chat as a tree: which belong to the branch that is shown, and their siblings.

A message that is edited and an answer that is asked for again get a sibling; nothing is taken out.
Pure but for the tree itself, which the UI thread owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moet_desk.ui.chat_records import Turn


class Tree:
    """All messages of one chat."""

    def __init__(self, turns: Iterable[Turn] = ()) -> None:
        self._turns: dict[int, Turn] = {}
        self._parents: dict[int, int | None] = {}  # none is younger than its child: no circles
        self._children: dict[int | None, list[int]] = {}
        self._chosen: dict[int | None, int] = {}  # the child that was shown last
        for turn in turns:
            self.add(turn)

    def add(self, turn: Turn) -> None:
        """Put a message behind its parent, or, without one that is here, at the beginning."""
        parent = turn.parent if turn.parent in self._turns else None
        self._parents[turn.id] = parent
        self._turns[turn.id] = turn
        self._children.setdefault(parent, []).append(turn.id)

    def _parent_of(self, turn: Turn) -> int | None:
        return self._parents[turn.id]

    @property
    def turns(self) -> Sequence[Turn]:
        """All messages, in the order in which they were stored."""
        return list(self._turns.values())

    def __contains__(self, turn_id: int | None) -> bool:
        return turn_id in self._turns

    def path_to(self, tip: int | None) -> list[Turn]:
        """The branch that ends in a message, from its beginning; it is the chosen one from now on.

        None, or a message that is not here: the branch of the newest message.
        """
        if tip not in self._turns:
            tip = next(reversed(self._turns), None)
        path: list[Turn] = []
        while tip is not None:
            turn = self._turns[tip]
            path.append(turn)
            tip = self._parent_of(turn)
            self._chosen[tip] = turn.id
        return path[::-1]

    def siblings(self, turn: Turn) -> Sequence[int]:
        """Ids of the messages at the same place, this one's too, oldest first."""
        return self._children[self._parent_of(turn)]

    def end_of(self, turn_id: int) -> int:
        """The last message of the branch that goes on behind a message: the one that was open
        last, else the newest.
        """
        while children := self._children.get(turn_id):
            turn_id = self._chosen.get(turn_id, children[-1])
        return turn_id
