"""tokenizer.json of a BPE, as the tokenizers library reads it: its parts, and the ways to cut text.

The patterns are those of the models' own published tokenizers. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_TAIL}"
_QWEN35 = (
    rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _cased(upper: str, lower: str, short: str) -> str:
    """A word of the o200k kind: capitals, then small letters, perhaps "'ll" behind it."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}[{upper}]*[{lower}]+{short}|{start}[{upper}]+[{lower}]*{short}"


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NO_HAN = r"&&[^\p{Han}]"
_O200K_TAIL = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = f"{_cased(_UPPER, _LOWER, _SHORT + '?')}|{_O200K_TAIL}"
_TEKKEN = f"{_cased(_UPPER, _LOWER, '')}|{_O200K_TAIL.replace('{1,3}', '')}"
_KIMI = (
    rf"[\p{{Han}}]+|{_cased(_UPPER + _NO_HAN, _LOWER + _NO_HAN, _SHORT + '?')}"
    rf"|\p{{N}}{{1,3}}|{_TAIL}"
)


@dataclass(frozen=True, slots=True)
class Splits:
    """How text is cut into words before merging: by each pattern in turn."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False  # a word that is a token is taken as it is


_LLAMA3_SPLITS = Splits((_LLAMA3,), ignore_merges=True)
_DIGITS_SPLITS = Splits((r"\p{N}", _GPT2))

SPLITS: Mapping[str, Splits] = {
    "gpt-2": Splits((_GPT2,)),
    "olmo": Splits((_GPT2,), nfc=True),
    "llama3": _LLAMA3_SPLITS,
    "llama-bpe": _LLAMA3_SPLITS,
    "llama-v3": _LLAMA3_SPLITS,
    "dbrx": Splits((_LLAMA3,)),
    "smaug-bpe": Splits((_LLAMA3,)),
    "glm4": Splits((_LLAMA3,)),
    "chatglm-bpe": Splits((_LLAMA3,)),
    "qwen2": Splits((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": Splits((_QWEN2,), nfc=True),
    "qwen35": Splits((_QWEN35,), nfc=True),
    "deepseek-v3": Splits(_DEEPSEEK),
    "hunyuan-dense": Splits(_DEEPSEEK),
    "joyai-llm": Splits(_DEEPSEEK),
    "gpt-4o": Splits((_O200K,)),
    "llama4": Splits((_O200K,)),
    "minimax-m2": Splits((_O200K,)),
    "tekken": Splits((_TEKKEN,), ignore_merges=True),
    "kimi-k2": Splits((_KIMI,)),
    "smollm": _DIGITS_SPLITS,
    "starcoder": _DIGITS_SPLITS,
    "refact": _DIGITS_SPLITS,
    "command-r": _DIGITS_SPLITS,
}
"""What GGUF files call it (tokenizer.ggml.pre) -> how that tokenizer cuts text."""

TIKTOKEN_KIMI = replace(SPLITS["kimi-k2"], ignore_merges=True)
"""Kimi as its own tokenizer has it: tiktoken takes a word that is a token as it is."""


def byte_letters() -> list[str]:
    """The character that stands for each byte in a byte-level BPE.

    Printable Latin-1 bytes stand for themselves; the 68 others got the code points from 256 on, in
    order (the table of GPT-2, used by every byte-level tokenizer.json).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def added_token(token_id: int, text: str, *, special: bool) -> dict[str, Any]:
    """A token that is found in a text before it is cut, as tokenizer.json lists it."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, **flags, "special": special}


def byte_level_bpe(
    ids: Mapping[str, int],
    splits: Splits,
    *,
    merges: Sequence[Sequence[str]],
    added: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """A byte-level BPE; see `bpe`."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cuts = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in splits.patterns
    ]
    parts = [*cuts, {**byte_level, "use_regex": False}]
    return bpe(
        ids,
        merges=merges,
        added=added,
        normalizer={"type": "NFC"} if splits.nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": parts},
        decoder={**byte_level, "use_regex": True},
        ignore_merges=splits.ignore_merges,
    )


def bpe(
    ids: Mapping[str, int],
    *,
    merges: Sequence[Sequence[str]],
    added: Sequence[Mapping[str, Any]],
    normalizer: object,
    pre_tokenizer: object,
    decoder: object,
    **model: object,
) -> dict[str, Any]:
    """tokenizer.json.

    Args:
        ids: of all tokens; those that are added are in it too, so they keep their ids.
        merges: pairs of tokens, the first to be joined first.
        added: entries of `added_token`.
        normalizer: as the library writes it.
        pre_tokenizer: the same.
        decoder: the same.
        model: what of the model's entry is not as usual.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **model,
            "vocab": ids,
            "merges": merges,
        },
    }
