"""tools/preprocess_data.py and tools/train_tokenizer.py: exact tokens, bad lines, and runs that end halfway."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import psutil
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.pretrain.errors import ConfigError

TOOLS = Path(__file__).resolve().parents[3] / "tools"
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]


@pytest.fixture(scope="module", autouse=True)
def tools_on_path():
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))


@pytest.fixture
def preprocess(tmp_path):
    """Runs the tool on lines (objects, or raw text as it stands) and returns the output prefix."""
    import preprocess_data

    def run(lines, *flags, keys=("text",)) -> str:
        source, prefix = tmp_path / "input.jsonl", str(tmp_path / "out")
        source.write_bytes(
            b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
        )
        preprocess_data.main(["--input", str(source), "--output-prefix", prefix, "--json-keys", *keys, *flags])
        return prefix

    return run


def documents(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    return [[int(t) for i in range(a, b) for t in dataset[i]] for a, b in zip(bounds[:-1], bounds[1:])]


def outputs(tmp_path) -> list[str]:
    return sorted(name for name in os.listdir(tmp_path) if name != "input.jsonl")


def rows(*texts: str) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


@pytest.fixture(scope="module")
def tokenizer_model(tmp_path_factory) -> str:
    import train_tokenizer

    folder = tmp_path_factory.mktemp("model")
    source = folder / "text.jsonl"
    source.write_text(
        "".join(
            json.dumps(row) + "\n" for row in rows("in the beginning", "and the earth was", "let there be light") * 9
        )
    )
    train_tokenizer.main(["--input", str(source), "--vocab-size", "40", "--output-prefix", str(folder / "tokenizer")])
    return str(folder / "tokenizer.model")


class TestTokens:
    def test_every_document_comes_back(self, preprocess):
        prefix = preprocess(rows("1 2 3", "4", "999 0"), *NULL)
        assert documents(prefix + "_text_document") == [[1, 2, 3], [4], [999, 0]]

    def test_end_of_document_is_appended(self, preprocess):
        prefix = preprocess(rows("1 2 3", "4"), *NULL, "--append-eod")
        assert documents(prefix + "_text_document") == [[1, 2, 3, 1000], [4, 1000]]

    def test_sentencepiece_tokens_are_the_models_own(self, preprocess, tokenizer_model):
        texts = ["let there be light", "the earth"]
        model = sentencepiece.SentencePieceProcessor(model_file=tokenizer_model)
        prefix = preprocess(rows(*texts), "--tokenizer-model", tokenizer_model, "--append-eod")
        assert documents(prefix + "_text_document") == [model.encode(text) + [model.eos_id()] for text in texts]

    @pytest.mark.parametrize(("vocab_size", "dtype"), [("65498", numpy.uint16), ("65499", numpy.int32)])
    def test_tokens_take_the_smallest_type_that_megatron_uses(self, preprocess, vocab_size, dtype):
        prefix = preprocess(rows("65497 5"), "--tokenizer-type", "NullTokenizer", "--vocab-size", vocab_size)
        dataset = IndexedDataset(prefix + "_text_document")
        assert dataset.index.dtype is dtype
        assert dataset[0].tolist() == [65497, 5]

    def test_each_key_gets_a_dataset(self, preprocess):
        prefix = preprocess([{"a": "1", "b": "2 3"}, {"a": "4", "b": ""}], *NULL, keys=("a", "b"))
        assert documents(prefix + "_a_document") == [[1], [4]]
        assert documents(prefix + "_b_document") == [[2, 3]]

    def test_workers_keep_the_order(self, preprocess):
        texts = [f"{i % 1000} {i // 1000}" for i in range(1500)]
        prefix = preprocess(rows(*texts), *NULL, "--workers", "2")
        assert documents(prefix + "_text_document") == [[int(t) for t in text.split()] for text in texts]


class TestBadInput:
    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b'{"text": ', r"not valid JSON"),
            (b"\xff\xfe{}", r"not UTF-8|not valid JSON"),
            (b"[1]", "a JSON list, not an object"),
            (b'{"txt": "1"}', "no key 'text' among 'txt': see --json-keys"),
            (b'{"text": 7}', "the value under 'text' is a int, not text"),
            (b'{"text": "1 x"}', "NullTokenizer can't read"),
            (b'{"text": "1 1001"}', "token 1001 is not in the vocabulary of 1001 tokens"),
            (b'{"text": "-1"}', "token -1 is not in the vocabulary"),
        ],
    )
    def test_first_bad_line_is_fatal_and_named(self, preprocess, tmp_path, line, reason):
        with pytest.raises(ConfigError, match=rf"input.jsonl:3: .*({reason}).*--max-bad-lines") as error:
            preprocess([{"text": "1"}, b"", line, {"text": "2"}], *NULL)
        assert "\n" not in str(error.value)
        assert outputs(tmp_path) == []

    @pytest.mark.parametrize("workers", ["1", "2"])
    def test_allowed_bad_lines_are_reported_counted_and_skipped(self, preprocess, capsys, workers):
        prefix = preprocess(
            [b"oops", {"text": "1"}, b"[]", {"text": "2"}], *NULL, "--max-bad-lines", "2", "--workers", workers
        )
        assert documents(prefix + "_text_document") == [[1], [2]]
        told = capsys.readouterr().err
        assert "input.jsonl:1: not valid JSON" in told and "input.jsonl:3: a JSON list" in told
        assert "2 bad lines skipped" in told

    def test_one_bad_line_too_many_is_fatal(self, preprocess, tmp_path):
        with pytest.raises(ConfigError, match=r"input.jsonl:3: .*bad line 2, more than --max-bad-lines 1"):
            preprocess([b"oops", {"text": "1"}, b"oops"], *NULL, "--max-bad-lines", "1")
        assert outputs(tmp_path) == []

    def test_missing_and_empty_input(self, tmp_path):
        import preprocess_data

        with pytest.raises(ConfigError, match="absent.jsonl is not a file"):
            preprocess_data.main(
                ["--input", str(tmp_path / "absent.jsonl"), "--output-prefix", str(tmp_path / "out"), *NULL]
            )
        (tmp_path / "empty.jsonl").touch()
        with pytest.raises(ConfigError, match="is empty"):
            preprocess_data.main(
                ["--input", str(tmp_path / "empty.jsonl"), "--output-prefix", str(tmp_path / "out"), *NULL]
            )

    def test_input_without_text(self, preprocess, tmp_path):
        with pytest.raises(ConfigError, match="holds no text"):
            preprocess(rows("", ""), *NULL)
        assert outputs(tmp_path) == []

    def test_wrong_vocab_size(self, preprocess, tokenizer_model):
        with pytest.raises(ConfigError, match="--vocab-size 99 is not the 40 tokens"):
            preprocess(rows("let"), "--tokenizer-model", tokenizer_model, "--vocab-size", "99")


class TestOutput:
    def test_existing_dataset_is_kept(self, preprocess):
        prefix = preprocess(rows("1"), *NULL)
        with pytest.raises(ConfigError, match="exists already; give another prefix, or --overwrite"):
            preprocess(rows("2"), *NULL)
        assert documents(prefix + "_text_document") == [[1]]

    def test_existing_dataset_is_replaced_on_request(self, preprocess):
        preprocess(rows("1"), *NULL)
        assert documents(preprocess(rows("2 2"), *NULL, "--overwrite") + "_text_document") == [[2, 2]]

    def test_nothing_but_whole_files_appears(self, preprocess, tmp_path):
        preprocess(rows("1"), *NULL)
        assert outputs(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]

    def test_interrupted_run_leaves_nothing(self, preprocess, tmp_path, monkeypatch):
        import preprocess_data

        def interrupt(self, num_bytes):
            raise KeyboardInterrupt

        monkeypatch.setattr(preprocess_data.Progress, "advance", interrupt)
        with pytest.raises(KeyboardInterrupt):
            preprocess(rows("1", "2"), *NULL)
        assert outputs(tmp_path) == []

    def test_interrupted_renaming_leaves_no_index(self, preprocess, tmp_path, monkeypatch):
        preprocess(rows("1"), *NULL)
        replace = os.replace

        def fail_at_index(source, target):
            if target.endswith(".idx"):
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail_at_index)
        with pytest.raises(KeyboardInterrupt):
            preprocess(rows("2 2 2"), *NULL, "--overwrite")
        assert outputs(tmp_path) == ["out_text_document.bin"]


def test_killed_run_leaves_no_index_and_no_process(tmp_path):
    """SIGKILL in the middle: no clean-up code runs, and still nothing looks whole and no worker stays behind."""
    source = tmp_path / "input.jsonl"
    source.write_text('{"text": "1 2 3"}\n' * 400_000)
    command = [
        sys.executable,
        str(TOOLS / "preprocess_data.py"),
        "--input",
        str(source),
        "--output-prefix",
        str(tmp_path / "out"),
    ]
    with open(tmp_path / "log", "w") as log:
        tool = subprocess.Popen([*command, *NULL, "--workers", "2", "--log-interval", "100"], stdout=log, stderr=log)
    partial = tmp_path / "out_text_document.bin.partial"
    deadline = time.monotonic() + 60
    while not (partial.exists() and partial.stat().st_size) and tool.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = psutil.Process(tool.pid).children(recursive=True)
    tool.send_signal(signal.SIGKILL)
    assert tool.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(workers, timeout=10)
    for worker in alive:
        worker.kill()
    assert len(workers) == 2 and alive == []
    assert not list(tmp_path.glob("*.idx"))


class TestTrainTokenizer:
    def train(self, folder, *flags, texts=("in the beginning", "let there be light"), name="tokenizer"):
        import train_tokenizer

        source = folder / "text.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows(*texts)))
        train_tokenizer.main(["--input", str(source), "--output-prefix", str(folder / name), *flags])
        return folder / f"{name}.model"

    def test_same_input_same_files(self, tmp_path):
        first, second = (self.train(tmp_path, "--vocab-size", "40", name=name) for name in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()
        assert first.with_suffix(".vocab").read_text() == second.with_suffix(".vocab").read_text()

    def test_end_of_document_is_a_token_that_no_text_spells(self, tmp_path):
        model = sentencepiece.SentencePieceProcessor(model_file=str(self.train(tmp_path, "--vocab-size", "40")))
        assert model.id_to_piece(model.eos_id()) == "<|endoftext|>"
        assert model.eos_id() not in model.encode("<|endoftext|>")

    def test_text_comes_back_as_it_was(self, tmp_path):
        texts = ("two  spaces, ﬁ and é", "a\nnew line 2026", " led by a space")
        model = sentencepiece.SentencePieceProcessor(
            model_file=str(self.train(tmp_path, "--vocab-size", "45", texts=texts))
        )
        assert [model.decode(model.encode(text)) for text in texts] == list(texts)

    def test_bytes_spell_what_the_vocabulary_lacks(self, tmp_path):
        path = self.train(tmp_path, "--vocab-size", "300", "--byte-fallback")
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        assert model.decode(model.encode("日本")) == "日本"

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--vocab-size", "5"], r"--vocab-size 5 is smaller than the \d+ characters"),
            (["--vocab-size", "9000"], r"--vocab-size 9000 is more than .* can fill: at most \d+"),
            (["--vocab-size", "0"], "--vocab-size 0 is too small"),
            (["--vocab-size", "40", "--json-keys", "body"], r"text.jsonl:1: no key 'body'"),
        ],
    )
    def test_mistakes_are_one_line(self, tmp_path, flags, message):
        with pytest.raises(ConfigError, match=message) as error:
            self.train(tmp_path, *flags)
        assert "\n" not in str(error.value)
        assert not list(tmp_path.glob("*.model"))

    def test_existing_model_is_kept(self, tmp_path):
        self.train(tmp_path, "--vocab-size", "40")
        with pytest.raises(ConfigError, match="exists already"):
            self.train(tmp_path, "--vocab-size", "41")


def test_mistake_on_the_command_line_is_one_line_and_status_2(tmp_path):
    command = [
        sys.executable,
        str(TOOLS / "preprocess_data.py"),
        "--input",
        str(tmp_path / "absent"),
        "--output-prefix",
        "x",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("error: --input") and result.stderr.count("\n") == 1
