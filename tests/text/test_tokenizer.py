"""Text <-> ids: bytes are kept, control ids never come from text, broken files say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference

import ling_local
from ling_local.errors import ModelError
from ling_local.text.tokenizer import Tokenizer
from text.samples import CONTROL, HARD_TEXTS, ling_tokenizer, tokenizer_data, tokenizer_without_tags


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_round_trips_and_never_gives_a_control_id(text: str) -> None:
    tokens = ling_tokenizer()
    ids = tokens.encode(text)
    assert not [i for i in ids if tokens.is_control(i)]
    assert b"".join(map(tokens.token_bytes, ids)) == text.encode()
    assert tokens.decode(ids) == text


def test_ids_equal_those_of_the_tokenizers_library_for_ordinary_text() -> None:
    reference = Reference.from_str(json.dumps(tokenizer_data()))
    for text in (" the lamp\n    return a + b\n", "日本語 café", "detailed thinking on"):
        assert ling_tokenizer().encode(text) == reference.encode(text, add_special_tokens=False).ids


def test_control_tokens_are_known_by_spelling_and_give_their_spelling() -> None:
    tokens = ling_tokenizer()
    assert sorted(tokens.control) == sorted(CONTROL)
    for spelling, token_id in tokens.control.items():
        assert tokens.is_control(token_id)
        assert tokens.token_bytes(token_id) == spelling.encode()
    assert tokens.size == max(tokens.control.values()) + 1


def test_ids_past_the_tokenizer_stand_for_nothing() -> None:
    tokens = ling_tokenizer()
    assert tokens.token_bytes(tokens.size) == b""
    assert tokens.token_bytes(tokens.size + 5000) == b""
    assert not tokens.is_control(tokens.size)


def test_a_rune_split_over_tokens_is_whole_again_in_decode() -> None:  # C001
    tokens = Tokenizer(_bytes_only())
    ids = tokens.encode("🙂é")
    assert len(ids) == 6
    assert [tokens.token_bytes(i) for i in ids] == [bytes([b]) for b in "🙂é".encode()]
    assert tokens.decode(ids) == "🙂é"
    assert tokens.decode(ids[:2]) == "\ufffd"


def test_leading_spaces_of_single_tokens_are_kept() -> None:  # C005
    tokens = ling_tokenizer()
    ids = tokens.encode("The lamp on the desk")
    assert "".join(tokens.decode([i]) for i in ids) == "The lamp on the desk"


def test_runs_of_single_spaces_survive_token_by_token() -> None:  # C095
    tokens = ling_tokenizer()
    space = tokens.encode(" ")[0]
    assert tokens.decode([space] * 100) == " " * 100


def test_a_control_token_in_the_merges_cannot_come_back_from_text() -> None:
    data = tokenizer_data(())
    word = "lamp"
    data["model"]["vocab"] |= {"la": 9000, "mp": 9001, word: 9002}
    data["model"]["merges"] = [["l", "a"], ["m", "p"], ["la", "mp"]]
    assert Tokenizer(data).encode(word) == [9002]
    data["added_tokens"] = [_added(9002, word)]
    tokens = Tokenizer(data)
    assert tokens.encode(word) == [9000, 9001]
    assert tokens.decode([9000, 9001, 9002]) == "lamplamp"


def test_added_runs_of_blanks_are_ordinary_text() -> None:
    data = tokenizer_data()
    size = ling_tokenizer().size
    data["added_tokens"].append(_added(size, "        ") | {"special": False})
    tokens = Tokenizer(data)
    assert "        " not in tokens.control
    assert tokens.encode("        x")[0] == size
    assert tokens.decode(tokens.encode("        x")) == "        x"


def test_byte_fallback_tokens_give_their_byte() -> None:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "▁a": 258}
    data = tokenizer_data()
    data["model"] |= {"vocab": vocab, "merges": [["▁", "a"]], "byte_fallback": True}
    data["pre_tokenizer"] = None
    data["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    data["added_tokens"] = [_added(259, "<role>")]
    tokens = Tokenizer(data)
    ids = tokens.encode("a aé<role>")
    assert ids[:2] == [257, 258]
    assert b"".join(map(tokens.token_bytes, ids)) == "a aé<role>".encode()
    assert 259 not in ids


def test_nothing_is_added_by_a_post_processor() -> None:  # C073
    data = tokenizer_data()
    bos = ling_tokenizer().control["<|endoftext|>"]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [bos], "tokens": ["<|endoftext|>"]}},
    }
    assert Tokenizer(data).encode("lamp") == ling_tokenizer().encode("lamp")


def test_lone_surrogates_do_not_reach_the_tokenizer() -> None:  # C013
    tokens = ling_tokenizer()
    assert tokens.decode(tokens.encode("a\udcffb\ud800")) == "a\ufffdb\ufffd"


def test_load_takes_the_folder_or_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "模型 with space"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_data()), "utf-8")
    for place in (folder, folder / "tokenizer.json"):
        assert Tokenizer.load(place).encode("lamp é") == ling_tokenizer().encode("lamp é")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "missing"),
        (b"", "not a usable tokenizer"),
        (b"\xff\xfe", "not a usable tokenizer"),
        (b"{", "not a usable tokenizer"),
        (b"[]", "not a usable tokenizer"),
        (b"{}", "key 'model' is missing"),
        (b'{"model": {"type": "Unigram", "vocab": []}}', "only BPE"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}', "bytes have no token"),
        (b'{"model": {"type": "BPE", "vocab": {"a": "x"}, "merges": []}}', "not a usable tokenizer"),
        (b'{"model": {"type": "BPE", "vocab": {}}, "added_tokens": [{"id": 1}]}', "key 'content' is missing"),
    ],
)
def test_a_missing_or_broken_file_is_named_with_reason_and_repair(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        Tokenizer.load(tmp_path if content is not None else path)
    assert str(path) in caught.value.message
    assert reason in caught.value.message
    assert caught.value.hint


def test_a_merge_of_unknown_tokens_is_a_model_error(tmp_path: Path) -> None:
    data = tokenizer_data()
    data["model"]["merges"].append(["nowhere", "known"])
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(data), "utf-8")
    with pytest.raises(ModelError, match="not a usable tokenizer"):
        Tokenizer.load(path)


def test_tags_that_are_no_tokens_are_not_control() -> None:
    tokens = tokenizer_without_tags()
    assert sorted(tokens.control) == ["<|endoftext|>", "<|role_end|>"]
    assert tokens.decode(tokens.encode("<think>x</think>")) == "<think>x</think>"


def test_the_shipped_tokenizer_knows_the_control_tokens_and_keeps_every_text() -> None:
    tokens = Tokenizer.load(Path(ling_local.__file__).parent / "data" / "demo")
    assert set(CONTROL) <= set(tokens.control)
    for text in HARD_TEXTS:
        ids = tokens.encode(text)
        assert tokens.decode(ids) == text
        assert not any(map(tokens.is_control, ids))


def _added(token_id: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True} | flags


def _bytes_only() -> dict[str, object]:
    data = tokenizer_data()
    vocab = {s: i for s, i in data["model"]["vocab"].items() if len(s) == 1}
    data["model"] |= {"vocab": vocab, "merges": []}
    return data
