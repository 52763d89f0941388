"""The palette's entries and how keys are written: data and one pure function."""

from __future__ import annotations

COMMANDS = (
    ("chat", "New chat", "Begin an empty chat; this one is kept", "new"),
    ("chat", "Earlier chats", "Search, open and delete", "chats"),
    ("chat", "Stop", "Stop the answer; its text is kept", "stop"),
    ("chat", "Answer again", "Answer the last message again", "retry"),
    ("chat", "Quality", "Fast, balanced or exact experts", "quality"),
    ("chat", "Copy the last answer", "As Markdown", "copy_answer"),
    ("chat", "Copy code", "The next block of code of the answer or message", "copy_code"),
    ("chat", "Edit the message", "Write another version; all versions stay", "edit"),
    ("chat", "Message before", "Move the block cursor up", "block(-1)"),
    ("chat", "Version before", "Of the message under the cursor", "version(-1)"),
    ("chat", "Version behind", "Of the message under the cursor", "version(1)"),
    ("chat", "Reasoning", "Unfold what the model said to itself, or fold it", "thoughts"),
    ("chat", "Find in this chat", "In all versions of its messages", "find"),
    ("chat", "Attach a file", "A text file for the next message", "attach"),
    ("chat", "Options of this chat", "System prompt, quality, sampling", "options"),
    ("chat", "Save as Markdown", "In the folder you started in", "export('md')"),
    ("chat", "Save as JSON", "With times and figures", "export('json')"),
    ("chat", "First message", "Go to the beginning of the chat", "first"),
    (
        "chat",
        "Underline what was made again",
        "Words of balanced answers, with 4-bit experts",
        "mark_reruns",
    ),
    ("chat", "Side rail", "Show or hide it in wide windows", "rail"),
    ("chat", "Go to the end", "Follow the text again", "follow"),
    ("cache", "Cache measure", "Where experts are, heat, hits or age", "measure"),
    ("cache", "Cache view", "Grid, dense, layers or a list of experts", "view"),
    ("cache", "Order of the list of experts", "Uses, fetches, last use or layer", "order"),
    ("cache", "Record what the cache does", "Begin or end it; for --demo-trace", "record"),
    ("cache", "Pause the cache picture", "The engine still runs", "pause"),
    ("models", "Sign in to the hub", "For models that ask who fetches them", "sign_in"),
    ("doctor", "Check this computer again", "Findings with cause and fix", "again"),
    ("doctor", "Measure this computer", "RAM, drive and card, for forecasts", "measure"),
    ("doctor", "Put in order", "Folders, who may read files, leftovers", "fix"),
)
"""Screen, title, explanation and action of each entry that acts on a screen."""

PLAYBACK = (
    ("Recording: play or pause", "All screens stand still (F12)", "toggle"),
    ("Recording: forward", "Five seconds on", "forward"),
    ("Recording: back", "Five seconds back", "back"),
    ("Recording: from the beginning", "Show it again", "begin"),
    ("Recording: faster", "Up to eight times the real speed", "faster"),
    ("Recording: slower", "Down to a quarter", "slower"),
)
"""Title, explanation and what it does, of the entries that exist while a recording is played."""

GO = (
    ("chat", "Chat", "Go to the chat (F2)"),
    ("cache", "Cache", "Go to the expert cache (F3)"),
    ("models", "Models", "Models on this computer, and jobs (F4)"),
    ("endpoint", "Endpoint", "Address, key and texts to copy for other programs (F5)"),
    ("settings", "Settings", "Everything that can be chosen (F6)"),
    ("log", "Log", "What happened (F8)"),
    ("doctor", "Doctor", "What is wrong on this computer, and what to do (F7)"),
)
"""Screen, title and explanation of each entry that changes the screen."""


_KEY_WORDS = {
    "escape": "Esc",
    "question_mark": "?",
    "slash": "/",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "comma": ",",
    "full_stop": ".",
    "minus": "-",
    "plus": "+",
}


def show_key(key: str) -> str:
    """A key as people write it: "Ctrl+N", "Esc", "M", "Shift+G"."""
    *modifiers, last = key.split("+")
    if len(last) == 1:
        modifiers += ["shift"] if last.isupper() else []
        last = last.upper()
    else:
        last = _KEY_WORDS.get(last, last.capitalize())
    return "+".join([*(part.capitalize() for part in modifiers), last])
