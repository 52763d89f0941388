"""A model's text side: tokenizer, chat template, end tokens and recommended sampling.

Reads the small files beside the weights (tokenizer.json, chat_template.jinja,
tokenizer_config.json, generation_config.json, config.json) and turns messages into token ids.
Immutable after loading; every method may be called from any thread. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from moet_desk.engine.detokenize import Detokenizer, TokenBytes
from moet_desk.engine.handle import Sampling
from moet_desk.engine.messages import SpecialText, prepare_messages, prepare_tools
from moet_desk.engine.parsers.answers import CallFormat, PromptEnd
from moet_desk.engine.parsers.formats import choose_format, prompt_end
from moet_desk.engine.parsers.harmony import STOPS
from moet_desk.engine.template import ChatTemplate
from moet_desk.errors import MoetError, fail

_PROMPT_END_TOKENS = 16
"""At the end of a prompt; a tag of reasoning and the white space behind it are among them."""

_PROBE = ({"role": "user", "content": "."},)


@dataclass(frozen=True, slots=True)
class AddedToken:
    """An entry of "added_tokens" in tokenizer.json: text that is one token wherever it stands."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool

    @property
    def is_control(self) -> bool:
        """Whether it steers the model, so that a user's text must not produce it.

        Some tokenizers list runs of spaces as added tokens; those are ordinary text.
        """
        return self.special or not self.text.isspace()


class Text:
    """The text side of one model. Make it with `Text.load`."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        template: str | None,
        special: Mapping[str, str],
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        adds_bos: bool,
    ) -> None:
        """Put the parts together.

        Args:
            spec: tokenizer.json.
            template: the chat template's text, None if the model has none.
            special: special tokens by name ("bos_token", "eos_token", ...).
            config: config.json.
            generation: generation_config.json; its end tokens win over config's.
            adds_bos: the tokenizer's own statement that a prompt begins with bos.

        Raises:
            MoetError: MD-SRC-07 (files), MD-CHAT-01 (template).
        """
        self._spec = spec
        self._tokenizer = _tokenizer(spec)
        self._added = tuple(_added_token(entry) for entry in spec.get("added_tokens") or ())
        self._controls = {token.text: token for token in self._added if token.is_control}
        self._guard = SpecialText(self._controls)
        self._template = ChatTemplate(template, tokens=special) if template is not None else None
        self.switches = () if self._template is None else self._template.switches
        self.efforts = () if self._template is None else self._template.efforts
        self._adds_bos = adds_bos
        self.answers = choose_format(str(config.get("model_type")), template)
        self.vocab_size = max(_whole(config, "vocab_size"), self._tokenizer.get_vocab_size())
        self.eos_ids = _end_ids(config, generation, special, self._tokenizer)
        if self.answers.calls is CallFormat.HARMONY:  # config.json knows one of them only
            self.eos_ids |= {self._controls[name].id for name in STOPS if name in self._controls}
        self.bos_id = _first_id(config, generation, special, self._tokenizer)
        self.defaults = _default_sampling(generation)
        self._bytes = TokenBytes(
            self._tokenizer.id_to_token,
            spec.get("decoder"),
            added={token.id: token.text for token in self._added},
        )

    @classmethod
    def load(cls, folder: Path) -> Text:
        """Read the text files of a pack or a source.

        Raises:
            MoetError: MD-SRC-01 no tokenizer.json, MD-SRC-07 a file that cannot be used,
                MD-CHAT-01 a template that is not valid.
        """
        if not (folder / "tokenizer.json").is_file():
            raise fail("MD-SRC-01", path=str(folder), missing="tokenizer.json")
        settings = _read_json(folder / "tokenizer_config.json")
        spec = _read_json(folder / "tokenizer.json")
        try:
            return cls(
                spec,
                template=_read_template(folder, settings),
                special=_special_tokens(settings),
                config=_read_json(folder / "config.json"),
                generation=_read_json(folder / "generation_config.json"),
                adds_bos=bool(settings.get("add_bos_token")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            reason = f"{type(problem).__name__}: {problem}"
            raise fail("MD-SRC-07", path=str(folder / "tokenizer.json"), reason=reason) from problem

    # -- messages and prompts to ids ----------------------------------------------------------

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the prompt text of a chat, for people to read.

        Raises:
            MoetError: MD-API-04 (messages or tools), MD-CHAT-01 (template).
        """
        text, mark = self._render_marked(messages, tools, add_generation_prompt)
        return text.replace(mark, "") if mark else text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        switches: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the prompt's ids: special tokens from the template only, never from the content.

        `switches` are variables of the template about reasoning.

        Raises:
            MoetError: as `render`.
        """
        text, mark = self._render_marked(messages, tools, add_generation_prompt, switches)
        return self.encode(text) if mark is None else self._encode_marked(text, mark)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text in which special tokens are spelt out."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, beginning with bos if the model's texts do."""
        ids = self.encode(text)
        if self._begins_with_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text in which nothing is a special token."""
        ids: list[int] = self._plain_tokenizer.encode(text, add_special_tokens=False).ids
        controls = {token.id for token in self._controls.values()}
        if len(text) > 1 and not controls.isdisjoint(ids):
            # Only a vocabulary that can merge its way to a control token gets here.
            half = len(text) // 2
            return self.encode_plain(text[:half]) + self.encode_plain(text[half:])
        return ids

    @property
    def controls(self) -> Mapping[str, int]:
        """Control tokens, text -> id."""
        return {text: token.id for text, token in self._controls.items()}

    def control_spec(self) -> str:
        """tokenizer.json in which every control token is special, so that no text spells one."""
        added = [
            {**entry, "special": entry["content"] in self._controls}
            for entry in self._spec.get("added_tokens") or ()
        ]
        return json.dumps({**self._spec, "added_tokens": added})

    # -- ids to text --------------------------------------------------------------------------

    def detokenizer(self) -> Detokenizer:
        """Return a fresh incremental decoder for one answer."""
        return Detokenizer(self._bytes, self.eos_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for an unused id."""
        return self._bytes[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included (end tokens too)."""
        return b"".join(self._bytes[i] for i in ids).decode("utf-8", "replace")

    def prompt_end(self, ids: Sequence[int]) -> PromptEnd:
        """What the end of a prompt says of reasoning."""
        return prompt_end(self.decode(ids[-_PROMPT_END_TOKENS:]), self.answers)

    # -- inside -------------------------------------------------------------------------------

    def _render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        switches: Mapping[str, Any] | None = None,
    ) -> tuple[str, str | None]:
        if self._template is None:
            raise fail("MD-CHAT-01", reason="this model has none; use plain prompts")
        try:
            ready, offered = prepare_messages(messages), prepare_tools(tools)
            ready, offered, mark = self._guard.guard(ready, offered)
        except RecursionError as problem:
            reason = "the messages are nested too deeply"
            raise fail("MD-CHAT-01", reason=reason) from problem
        text = self._template.render(
            ready, offered, add_generation_prompt=add_generation_prompt, switches=switches
        )
        return text, mark

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Encode piece by piece: control tokens outside of marks, everything else as plain text.

        A tokenizer splits at added tokens before anything else, so the pieces between them encode
        as they would within the whole.
        """
        ids: list[int] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            ids += self._encode_piece(text[end : match.start()], mark)
            ids.append(self._controls[match[match.lastindex or 0]].id)
            end = match.end()
        return ids + self._encode_piece(text[end:], mark)

    def _encode_piece(self, piece: str, mark: str) -> list[int]:
        return self.encode_plain(piece.replace(mark, "")) if piece else []

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Every control token as its own group, the longest first as tokenizers match them."""
        ordered = sorted(self._controls.values(), key=lambda token: -len(token.text))
        return re.compile("|".join(_token_pattern(token) for token in ordered) or "(?!)")

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """The same tokenizer without control tokens; made when a text first needs it."""
        kept = [
            entry
            for entry in self._spec.get("added_tokens") or ()
            if entry["content"] not in self._controls
        ]
        return _tokenizer({**self._spec, "added_tokens": kept, "post_processor": None})

    @cached_property
    def _begins_with_bos(self) -> bool:
        """Whether texts begin with bos, said by the tokenizer or shown by the template.

        Many files say add_bos_token false only because the template writes bos itself.
        """
        if self.bos_id is None or self._adds_bos or self._template is None:
            return self._adds_bos
        try:
            return self.encode_chat(_PROBE)[:1] == [self.bos_id]
        except MoetError:
            return False


def _tokenizer(spec: Mapping[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(json.dumps(spec))
    except Exception as problem:  # the library raises bare Exception
        raise fail("MD-SRC-07", path="tokenizer.json", reason=str(problem)) from problem
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(
        id=int(entry["id"]),
        text=str(entry["content"]),
        special=bool(entry.get("special")),
        lstrip=bool(entry.get("lstrip")),
        rstrip=bool(entry.get("rstrip")),
    )


def _token_pattern(token: AddedToken) -> str:
    before = r"\s*" if token.lstrip else ""
    after = r"\s*" if token.rstrip else ""
    return f"{before}({re.escape(token.text)}){after}"


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} if there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        raise fail("MD-SRC-07", path=str(path), reason=str(problem)) from problem
    if not isinstance(value, dict):
        raise fail("MD-SRC-07", path=str(path), reason="it holds no JSON object")
    return value


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, ValueError) as problem:
            raise fail("MD-SRC-07", path=str(path), reason=str(problem)) from problem
    stored = settings.get("chat_template")
    if isinstance(stored, list):  # several by name
        by_name = {entry["name"]: entry["template"] for entry in stored}
        stored = by_name.get("default", next(iter(by_name.values()), None))
    return stored if isinstance(stored, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; older files write them as objects."""
    found: dict[str, str] = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _whole(config: Mapping[str, Any], name: str) -> int:
    nested = config.get("text_config")
    inner = nested if isinstance(nested, dict) else {}
    value = config.get(name, inner.get(name, 0))
    return value if isinstance(value, int) else 0


def _listed_ids(value: object) -> list[int]:
    listed = value if isinstance(value, list) else [value]
    return [i for i in listed if isinstance(i, int) and not isinstance(i, bool)]


def _end_ids(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    special: Mapping[str, str],
    tokenizer: Tokenizer,
) -> frozenset[int]:
    for source in (generation, config, config.get("text_config") or {}):
        ids = _listed_ids(source.get("eos_token_id"))
        if ids:
            return frozenset(ids)
    named = tokenizer.token_to_id(special.get("eos_token", ""))
    return frozenset(() if named is None else (named,))


def _first_id(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    special: Mapping[str, str],
    tokenizer: Tokenizer,
) -> int | None:
    named: int | None = tokenizer.token_to_id(special.get("bos_token", ""))
    if named is not None:
        return named
    for source in (generation, config, config.get("text_config") or {}):
        ids = _listed_ids(source.get("bos_token_id"))
        if ids:
            return ids[0]
    return None


def _default_sampling(generation: Mapping[str, Any]) -> Sampling:
    """The model's recommendation; without one, the plain distribution: temperature 1, no filter."""

    def number(name: str, otherwise: float) -> float:
        value = generation.get(name)
        return float(value) if isinstance(value, int | float) else otherwise

    greedy = generation.get("do_sample") is False
    return Sampling(
        temperature=0.0 if greedy else number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
    )
