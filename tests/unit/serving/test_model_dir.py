"""What a model directory says, and directories that are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from serving.model_dir import (
    ModelDirError,
    end_token_ids,
    load_tokenizer,
    model_revision,
    read_config,
    tokenizer_digest,
    vocab_tokens,
    weight_files,
)

VOCAB = {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}
MERGES = [("a", "b"), ("ab", "c")]


def tokenizer_of(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    write_json(path / "config.json", {"vocab_size": 8, "eos_token_id": 5})
    tokenizer_of(VOCAB, MERGES).save(str(path / "tokenizer.json"))
    (path / "model.safetensors").write_bytes(bytes(3_000_000))
    return path


def change_tokenizer(model_dir: Path, change: dict[str, Any]) -> None:
    path = model_dir / "tokenizer.json"
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | change)


def test_the_config_is_read_and_names_the_vocabulary(model_dir: Path) -> None:
    assert read_config(model_dir)["eos_token_id"] == 5
    assert vocab_tokens(model_dir) == 8


def test_a_model_that_brings_code_is_refused(model_dir: Path) -> None:
    write_json(model_dir / "config.json", {"auto_map": {"AutoModel": "evil.Model"}})
    for reads in (read_config, vocab_tokens, model_revision):
        with pytest.raises(ModelDirError, match="auto_map"):
            reads(model_dir)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe{}", b""])
def test_a_config_that_is_no_json_object_is_refused(model_dir: Path, content: bytes) -> None:
    (model_dir / "config.json").write_bytes(content)
    with pytest.raises(ModelDirError, match=r"config\.json is no JSON"):
        read_config(model_dir)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named_without_its_path(model_dir: Path, name: str) -> None:
    (model_dir / name).unlink()
    with pytest.raises(ModelDirError) as refused:
        load_tokenizer(model_dir) if name == "tokenizer.json" else read_config(model_dir)
    assert str(refused.value) == f"the model directory has no {name}"


@pytest.mark.parametrize("size", [0, -1, "8", None, True, 8.0])
def test_a_vocabulary_that_is_no_count_is_refused(model_dir: Path, size: object) -> None:
    write_json(model_dir / "config.json", {"vocab_size": size})
    with pytest.raises(ModelDirError, match="vocab_size"):
        vocab_tokens(model_dir)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (None, 5, {5}),
        (None, None, set()),
        ({}, 5, {5}),
        ({"eos_token_id": None}, 5, {5}),
        ({"eos_token_id": 6}, 5, {6}),
        ({"eos_token_id": [6, 7]}, 5, {6, 7}),
        ({"eos_token_id": 0}, 5, {0}),
    ],
)
def test_the_generation_config_names_the_end_tokens_before_the_config(
    model_dir: Path, generation: object, config: object, expected: set[int]
) -> None:
    write_json(model_dir / "config.json", {"eos_token_id": config})
    if generation is not None:
        write_json(model_dir / "generation_config.json", generation)
    assert end_token_ids(model_dir) == expected


@pytest.mark.parametrize("named", ["5", [5, "6"], True, -1, [[5]]])
def test_end_tokens_that_are_no_ids_are_refused(model_dir: Path, named: object) -> None:
    write_json(model_dir / "config.json", {"eos_token_id": named})
    with pytest.raises(ModelDirError, match="eos_token_id"):
        end_token_ids(model_dir)


def test_a_tokenizer_never_truncates_or_pads_whatever_its_file_says(model_dir: Path) -> None:
    tokenizer = tokenizer_of(VOCAB, MERGES)
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    assert load_tokenizer(model_dir).encode("a b c a b c").ids == [0, 1, 2, 0, 1, 2]


def test_a_tokenizer_without_a_model_is_refused(model_dir: Path) -> None:
    write_json(model_dir / "tokenizer.json", {"version": "1.0"})
    for reads in (load_tokenizer, tokenizer_digest):
        with pytest.raises(ModelDirError, match=r"tokenizer\.json has no model"):
            reads(model_dir)


def test_the_tokenizer_digest_does_not_depend_on_how_the_file_is_written(model_dir: Path) -> None:
    before = tokenizer_digest(model_dir)
    path = model_dir / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = ["a b", "ab c"]
    content["model"]["vocab"] = dict(reversed(VOCAB.items()))
    content["truncation"] = {"max_length": 4}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=True), encoding="utf-8")
    assert tokenizer_digest(model_dir) == before
    assert len(before) == 64


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [
        (VOCAB | {"d": 6}, MERGES),
        ({"b": 0, "a": 1, "c": 2, "ab": 3, "abc": 4}, MERGES),
        (VOCAB, MERGES[:1]),
    ],
)
def test_the_tokenizer_digest_changes_with_vocabulary_and_merges(
    model_dir: Path, vocab: dict[str, int], merges: list[tuple[str, str]]
) -> None:
    before = tokenizer_digest(model_dir)
    tokenizer_of(vocab, merges).save(str(model_dir / "tokenizer.json"))
    assert tokenizer_digest(model_dir) != before


@pytest.mark.parametrize(
    "added",
    [
        [],
        [{"id": 5, "content": "<end>", "special": False}],
        [{"id": 6, "content": "<end>", "special": True}],
        [{"id": 5, "content": "<eos>", "special": True}],
    ],
)
def test_the_tokenizer_digest_changes_with_added_tokens(
    model_dir: Path, added: list[dict[str, Any]]
) -> None:
    before = tokenizer_digest(model_dir)
    change_tokenizer(model_dir, {"added_tokens": added})
    assert tokenizer_digest(model_dir) != before


def test_a_copy_of_a_model_has_the_same_revision(model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    assert model_revision(copy) == model_revision(model_dir)


@pytest.mark.parametrize("position", [0, 2_100_000, 2_999_999])
def test_the_revision_changes_with_the_weights_though_their_size_does_not(
    model_dir: Path, position: int
) -> None:
    before = model_revision(model_dir)
    weights = model_dir / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[position] = 1
    weights.write_bytes(data)
    assert model_revision(model_dir) != before


def test_the_revision_changes_with_config_size_and_file_name(model_dir: Path) -> None:
    weights = model_dir / "model.safetensors"
    revisions = {model_revision(model_dir)}
    write_json(model_dir / "config.json", {"vocab_size": 9})
    revisions.add(model_revision(model_dir))
    weights.write_bytes(bytes(3_000_001))
    revisions.add(model_revision(model_dir))
    weights.rename(model_dir / "other.safetensors")
    revisions.add(model_revision(model_dir))
    assert len(revisions) == 4


def test_a_directory_is_left_as_it_was(model_dir: Path) -> None:
    before = sorted(path.name for path in model_dir.iterdir())
    model_revision(model_dir)
    tokenizer_digest(model_dir)
    assert sorted(path.name for path in model_dir.iterdir()) == before


def test_safetensors_are_taken_before_gguf_and_one_of_them_is_needed(model_dir: Path) -> None:
    (model_dir / "model.gguf").write_bytes(b"GGUF")
    assert [path.name for path in weight_files(model_dir)] == ["model.safetensors"]
    (model_dir / "model.safetensors").unlink()
    assert [path.name for path in weight_files(model_dir)] == ["model.gguf"]
    (model_dir / "model.gguf").unlink()
    with pytest.raises(ModelDirError, match=r"neither \*\.safetensors nor \*\.gguf"):
        model_revision(model_dir)
