"""The tokenizer in a GGUF file as the small files of a pack.

Owns what `tokenizer.ggml.*` means: a byte-level BPE ("gpt2") whose text is cut by a pattern with a
name, or a sentencepiece BPE with scores ("llama"). Makes tokenizer.json, tokenizer_config.json,
generation_config.json and chat_template.jinja. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moet_desk.errors import MoetError, fail
from moet_desk.store.gguf.fields import Fields, as_json, decimal
from moet_desk.store.tokenizer_json import SPLITS, added_token, bpe, byte_level_bpe

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "▁"
_END_FIELDS = ("eos", "eot", "eom")
"""Which ids end an answer; files name a turn's and a message's end beside the text's."""

_SAMPLING = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
"""generation_config.json -> what the maker of a file recommends in it."""


def tokenizer_files(fields: Fields, n_rows: int, *, has_own: bool = False) -> dict[str, bytes]:
    """The small files of the text side, by name.

    Args:
        fields: the file's.
        n_rows: tokens that the model's embedding has.
        has_own: the model's own tokenizer.json is there, so none is made.

    Raises:
        MoetError: MD-GGUF-04 this kind of tokenizer cannot be converted, MD-GGUF-05 its fields do
            not fit together.
    """
    vocabulary = _vocabulary(fields)
    kind = fields.text("tokenizer.ggml.model", "none")
    files = {} if has_own else {"tokenizer.json": _tokenizer(fields, vocabulary, kind, n_rows)}
    files["tokenizer_config.json"] = _settings(fields, vocabulary, kind)
    files["generation_config.json"] = _generation(fields, vocabulary)
    made = {name: as_json(value) for name, value in files.items()}
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        made["chat_template.jinja"] = template.encode()
    return made


def _tokenizer(fields: Fields, vocabulary: _Vocabulary, kind: str, n_rows: int) -> dict[str, Any]:
    if kind not in _KINDS:
        raise _unconverted(fields, f'its kind is "{kind}"')
    if len(vocabulary.tokens) > n_rows:
        words = f"it lists {len(vocabulary.tokens)} tokens, its embedding has {n_rows}"
        raise fields.wrong(words)
    seen: set[str] = set()
    for i, token, _ in vocabulary.used():
        if token in seen:
            raise fields.wrong(f"its token {i} ({token!r}) is there twice")
        seen.add(token)
    return _KINDS[kind](fields, vocabulary)


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: Sequence[str]
    kinds: Sequence[int]

    def used(self) -> Iterator[tuple[int, str, int]]:
        """Id, text and kind of every token that means something."""
        for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind != _UNUSED:
                yield i, token, kind

    def ids(self) -> Iterator[tuple[str, int]]:
        """Every token that means something, with its id."""
        return ((token, i) for i, token, _ in self.used())

    def added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is cut, as tokenizer.json lists them."""
        return [
            added_token(i, token, special=kind != _USER)
            for i, token, kind in self.used()
            if kind in (_UNKNOWN, _CONTROL, _USER) and token
        ]


def _vocabulary(fields: Fields) -> _Vocabulary:
    tokens = _texts(fields, "tokenizer.ggml.tokens")
    kinds = fields.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = [_NORMAL] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise fields.wrong("it has not one tokenizer.ggml.token_type for each token")
    return _Vocabulary(tokens, kinds)


def _texts(fields: Fields, name: str) -> list[str]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise fields.wrong(f"it has no list of texts {name}")
    return value


# -- tokenizer.json ----------------------------------------------------------------------------


def _byte_level(fields: Fields, vocabulary: _Vocabulary) -> dict[str, Any]:
    name = fields.text("tokenizer.ggml.pre", "none")
    splits = SPLITS.get(name)
    if splits is None:
        raise _unconverted(fields, f'its way to cut text is "{name}"')
    return byte_level_bpe(
        dict(vocabulary.ids()), splits, merges=_listed_merges(fields, vocabulary),
        added=vocabulary.added(),
    )  # fmt: skip


def _listed_merges(fields: Fields, vocabulary: _Vocabulary) -> list[list[str]]:
    """Pairs of tokens; the tokenizers library refuses others, but only when a model is loaded."""
    known = {token for _, token, _ in vocabulary.used()}
    merges = [merge.split(" ") for merge in _texts(fields, "tokenizer.ggml.merges")]
    for merge in merges:
        if len(merge) != 2 or not known.issuperset((*merge, "".join(merge))):
            raise fields.wrong(f"its merge {' '.join(merge)!r} is no pair of its tokens")
    return merges


def _sentencepiece(fields: Fields, vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise fields.wrong("it has not one tokenizer.ggml.scores for each token")
    if not isinstance(scores[0], float):
        raise fields.wrong("its tokenizer.ggml.scores are no numbers")
    steps = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    prefixed = fields.get("tokenizer.ggml.add_space_prefix") is not False
    start = [{"type": "Prepend", "prepend": _SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    decoders = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        *strip,
    ]
    unknown = [token for _, token, kind in vocabulary.used() if kind == _UNKNOWN]
    return bpe(
        dict(vocabulary.ids()),
        merges=_merges_of(vocabulary, scores),
        added=vocabulary.added(),
        normalizer={"type": "Sequence", "normalizers": [*start, *steps]},
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )


_KINDS: Mapping[str, Callable[[Fields, _Vocabulary], dict[str, Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
}
"""tokenizer.ggml.model -> what makes its tokenizer.json."""


def _merges_of(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[list[str]]:
    """The merges that sentencepiece makes: any two tokens that are one, the best score first."""
    ids = {token: i for i, token, kind in vocabulary.used() if kind == _NORMAL}
    found = [
        (-scores[i], ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [[left, right] for *_, left, right in sorted(found)]


# -- the other files ---------------------------------------------------------------------------


def _token_id(fields: Fields, vocabulary: _Vocabulary, name: str) -> int | None:
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    if value is None or value == 0xFFFFFFFF:  # written for "none"
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise fields.wrong(f"tokenizer.ggml.{name}_token_id is no number")
    if not 0 <= value < len(vocabulary.tokens):
        raise fields.wrong(f"tokenizer.ggml.{name}_token_id is {value}, beyond its vocabulary")
    return value


def _settings(fields: Fields, vocabulary: _Vocabulary, kind: str) -> dict[str, Any]:
    add_bos = fields.get("tokenizer.ggml.add_bos_token")
    if not isinstance(add_bos, bool):
        add_bos = kind == "llama"  # what programs take for granted where a file does not say
    settings: dict[str, Any] = {"add_bos_token": add_bos}
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    for name, short in names.items():
        token_id = _token_id(fields, vocabulary, name)
        if token_id is not None:
            settings[f"{short}_token"] = vocabulary.tokens[token_id]
    return settings


def _generation(fields: Fields, vocabulary: _Vocabulary) -> dict[str, Any]:
    ends = [_token_id(fields, vocabulary, name) for name in _END_FIELDS]
    found: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(i for i in ends if i is not None))}
    bos = _token_id(fields, vocabulary, "bos")
    if bos is not None:
        found["bos_token_id"] = bos
    for name, key in _SAMPLING.items():
        value = fields.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = decimal(value) if isinstance(value, float) else value
    return found


def _unconverted(fields: Fields, reason: str) -> MoetError:
    return fail("MD-GGUF-04", file=fields.file, reason=reason)
