"""Names of the files that make up a base model. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

MOST_FILES: Final = 10_000  # of a model's folder
LARGEST_SMALL: Final = 256 * 2**20  # bytes of a tokenizer's file
LARGEST_CONFIG: Final = 4 * 2**20  # of another one
LARGEST_INDEX: Final = 64 * 2**20
MOST_SMALL: Final = 64  # files of configuration and tokenizer

# What configuration and tokenizer are made of.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens*",
    "added_tokens*",
    "chat_template*",
    "vocab*",
    "merges*",
    "*.model",
)
_GGUF = "*.gguf"
_PICKLES = ("*.bin", "*.bin.index.json", "*.pt", "*.pth")

# The same by name, for servers that list nothing.
PROBED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    SINGLE_FILE,
    INDEX_FILE,
)
PROBED_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def is_small(name: str) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in _SMALL_FILES)


def largest(name: str) -> int:
    """Bytes that a small file may have."""
    return LARGEST_CONFIG if "config" in name else LARGEST_SMALL


def is_gguf(name: str) -> bool:
    return fnmatchcase(name.lower(), _GGUF)


def is_pickle(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _PICKLES)
