"""What a model directory says about itself, without torch: config, end tokens, tokenizer, digests.

Nothing is written there, nothing is downloaded, and no code from there is run.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# Enough to hold the header of a usual safetensors or GGUF file.
HEAD_BYTES = 1 << 20
SAMPLES = 256
SAMPLE_BYTES = 4096


class ModelDirError(ValueError):
    """A model directory that cannot be served; the start ends with this message."""


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json. Raises ModelDirError, also where the model wants its own code to be run."""
    config = _read_json(model_dir / "config.json")
    if "auto_map" in config:
        raise ModelDirError("config.json has auto_map: models that bring code are refused")
    return config


def vocab_tokens(model_dir: Path) -> int:
    """Ids the model knows: rows of its embedding, which may be more than the tokenizer has."""
    vocab = read_config(model_dir).get("vocab_size")
    if not isinstance(vocab, int) or not _is_count(vocab) or vocab == 0:
        raise ModelDirError(f"config.json has vocab_size {vocab!r}, it must be a positive integer")
    return vocab


def end_token_ids(model_dir: Path) -> frozenset[int]:
    """Ids that end a reply: generation_config.json's, or config.json's where that names none."""
    named = None
    if (model_dir / "generation_config.json").is_file():
        named = _read_json(model_dir / "generation_config.json").get("eos_token_id")
    if named is None:
        named = read_config(model_dir).get("eos_token_id")
    if named is None:
        return frozenset()
    ids = named if isinstance(named, list) else [named]
    if not all(_is_count(token_id) for token_id in ids):
        raise ModelDirError(f"eos_token_id is {named!r}, it must be token ids")
    return frozenset(ids)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """tokenizer.json, with its padding and truncation off: a prompt is never changed silently."""
    _read_tokenizer_json(model_dir)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_digest(model_dir: Path) -> str:
    """sha256 over vocabulary, merges and added tokens: if equal, an id means the same text."""
    tokenizer = _read_tokenizer_json(model_dir)
    model = tokenizer["model"]
    # Newer files write a merge as a pair, older ones as one string with a blank.
    merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges", ())]
    added = sorted(
        (token["id"], token["content"], token["special"])
        for token in tokenizer.get("added_tokens", ())
    )
    return _digest([model.get("type"), model.get("vocab"), merges, added])


def model_revision(model_dir: Path) -> str:
    """sha256 over config.json and, for each weights file, its name, size, head and spread samples.

    Samples, because reading whole weights would take longer than loading them. They tell apart
    checkpoints of one architecture, whose sizes and heads are equal.
    """
    files = weight_files(model_dir)
    digest = hashlib.sha256(_digest(read_config(model_dir)).encode())
    for path in files:
        digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
        _update_with_samples(digest, path)
    return digest.hexdigest()


def weight_files(model_dir: Path) -> list[Path]:
    """The *.safetensors files by name, or the *.gguf files. Raises ModelDirError without either."""
    for pattern in ("*.safetensors", "*.gguf"):
        if files := sorted(model_dir.glob(pattern)):
            return files
    raise ModelDirError("the model directory has neither *.safetensors nor *.gguf")


def _update_with_samples(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(HEAD_BYTES))
        for sample in range(SAMPLES):
            file.seek(size * sample // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
        file.seek(max(size - SAMPLE_BYTES, 0))
        digest.update(file.read(SAMPLE_BYTES))


def _read_tokenizer_json(model_dir: Path) -> dict[str, Any]:
    tokenizer = _read_json(model_dir / "tokenizer.json")
    if not isinstance(tokenizer.get("model"), dict):
        raise ModelDirError("tokenizer.json has no model")
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelDirError(f"the model directory has no {path.name}") from None
    except ValueError as error:
        raise ModelDirError(f"{path.name} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelDirError(f"{path.name} is no JSON object")
    return value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
