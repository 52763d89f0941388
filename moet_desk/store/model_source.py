"""A model's files as one source, whatever they are: a folder of safetensors files, or GGUF.

Owns the choice between the two, and the small files beside the weights as bytes. The packer, the
verifier and the commands open sources through here. Not bound to a thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moet_desk.errors import fail
from moet_desk.store.deepseek_template import SCRIPTS, template_of
from moet_desk.store.gguf.files import is_gguf
from moet_desk.store.gguf.source import open_gguf
from moet_desk.store.headers import damaged
from moet_desk.store.pack_format import COPIED_FILES
from moet_desk.store.quantization import (
    HF_QUANT_FILE,
    Quantization,
    read_hf_quant,
    read_quantization,
    says_quantization,
)
from moet_desk.store.sources import TensorIndex
from moet_desk.store.tiktoken import TIKTOKEN_FILE, can_convert, tokenizer_of

_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_TOKENIZER_SETTINGS = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model is made of.

    Attributes:
        path: as it was given, a folder or a file.
        config_path: where the config is, for messages.
        config: config.json.
        index: its tensors.
        small: the files of `COPIED_FILES` that it has, by name.
    """

    path: Path
    config_path: str
    config: Mapping[str, Any]
    index: TensorIndex
    small: Mapping[str, bytes]

    @classmethod
    def open(cls, path: Path) -> ModelSource:
        """Map the weights of a source and check every header.

        Raises:
            MoetError: MD-SRC-01, 02, 03, 05 as `TensorIndex.open`; MD-SRC-07 the config cannot be
                used, MD-SRC-09 its quantisation is not known; MD-GGUF-01..06.
        """
        if not is_gguf(path):
            small = read_small(path)
            config_path = str(path / _CONFIG)
            if _CONFIG not in small:
                raise fail("MD-SRC-01", path=str(path), missing=_CONFIG)
            config = parse_config(small[_CONFIG], config_path)
            index = TensorIndex.open(path, quantization_of(path, config))
            return cls(path, config_path, config, index, small)
        # a folder may hold what the file lacks; the config must be what names and shapes follow
        beside = read_small(path) if path.is_dir() else {}
        kept = {name: data for name, data in beside.items() if name != _CONFIG}
        model = open_gguf(path, has_tokenizer=_TOKENIZER in kept)
        config_path = str(model.files[0])
        config = parse_config(model.small[_CONFIG], config_path)
        return cls(path, config_path, config, model.index, {**model.small, **kept})

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.path if self.path.is_dir() else self.path.parent


def read_small(folder: Path) -> dict[str, bytes]:
    """The small files of a folder. Of a tiktoken vocabulary a tokenizer.json is made, and of
    DeepSeek's script a chat template.

    Raises:
        MoetError: MD-SRC-02 one cannot be read.
    """
    found = _read(folder, COPIED_FILES)
    settings = found.get(_TOKENIZER_SETTINGS)
    if _TOKENIZER not in found and settings is not None and can_convert(settings):
        vocabulary = _read(folder, (TIKTOKEN_FILE,)).get(TIKTOKEN_FILE)
        if vocabulary is not None:
            found[_TOKENIZER] = tokenizer_of(vocabulary, settings)
    if _TEMPLATE not in found and b'"chat_template"' not in (settings or b""):
        for name, script in _read(folder, SCRIPTS).items():
            found[_TEMPLATE] = template_of(script, name)
    return found


def quantization_of(folder: Path, config: Mapping[str, Any]) -> Quantization:
    """What a folder's config, or modelopt's own file beside it, says of quantised weights.

    Raises:
        MoetError: MD-SRC-09 it is not known here, MD-SRC-02 or 07 the file cannot be read.
    """
    if not says_quantization(config):
        data = _read(folder, (HF_QUANT_FILE,)).get(HF_QUANT_FILE)
        if data is not None:
            path = str(folder / HF_QUANT_FILE)
            return read_hf_quant(parse_config(data, path), path)
    return read_quantization(config, str(folder / _CONFIG))


def will_have_tokenizer(folder: Path) -> bool:
    """Whether a pack of this folder's small files will have a tokenizer. Raises as `read_small`."""
    if (folder / _TOKENIZER).is_file():
        return True
    settings = _read(folder, (_TOKENIZER_SETTINGS,)).get(_TOKENIZER_SETTINGS, b"")
    return (folder / TIKTOKEN_FILE).is_file() and can_convert(settings)


def _read(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    found = {}
    for name in names:
        path = folder / name
        try:
            if path.is_file():
                found[name] = path.read_bytes()
        except OSError as error:
            raise damaged(name, error.strerror or str(error)) from error
    return found


def parse_config(data: bytes, path: str) -> dict[str, Any]:
    """A config.json as an object.

    Raises:
        MoetError: MD-SRC-07 it is none.
    """
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise fail("MD-SRC-07", path=path, reason=str(error)) from error
    if not isinstance(config, dict):
        raise fail("MD-SRC-07", path=path, reason="it is not a JSON object")
    return config
