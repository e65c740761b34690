"""Tokenizers: what core makes of a configuration, and wrong vocabulary sizes as one clear error."""

import io
from types import SimpleNamespace

import pytest
import sentencepiece

from megatron.pretrain.errors import ConfigError
from megatron.pretrain.tokenizer import build_tokenizer, padded_vocab_size

TEXT = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"] * 20


def flags(tokenizer_type="SentencePieceTokenizer", tokenizer_model=None, vocab_size=None):
    return SimpleNamespace(tokenizer_type=tokenizer_type, tokenizer_model=tokenizer_model, vocab_size=vocab_size)


def train(path, **options) -> str:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        vocab_size=60,
        model_type="bpe",
        num_threads=1,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return str(path)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    return train(folder / "tokenizer.model", unk_id=0, eos_id=1, bos_id=-1, pad_id=-1)


def test_sentencepiece_model_is_used_as_trained(model_file):
    tokenizer = build_tokenizer(flags(tokenizer_model=model_file))
    reference = sentencepiece.SentencePieceProcessor(model_file=model_file)
    assert tokenizer.vocab_size == 60
    assert tokenizer.eod == 1
    assert tokenizer.tokenize("the lazy fox") == reference.encode("the lazy fox")
    assert tokenizer.detokenize(tokenizer.tokenize("the lazy fox")) == "the lazy fox"


def test_vocab_size_that_agrees_is_accepted(model_file):
    assert build_tokenizer(flags(tokenizer_model=model_file, vocab_size=60)).vocab_size == 60


def test_vocab_size_that_disagrees_names_both_sizes(model_file):
    with pytest.raises(ConfigError, match=r"--vocab-size 61 is not the 60 tokens of --tokenizer-model"):
        build_tokenizer(flags(tokenizer_model=model_file, vocab_size=61))


def test_model_without_end_of_document_is_refused(tmp_path):
    model = train(tmp_path / "no_eos.model", unk_id=0, eos_id=-1, bos_id=-1, pad_id=-1)
    with pytest.raises(ConfigError, match="no end-of-sentence token"):
        build_tokenizer(flags(tokenizer_model=model))


def test_unreadable_models_are_one_error(tmp_path):
    with pytest.raises(ConfigError, match="needs --tokenizer-model FILE"):
        build_tokenizer(flags())
    with pytest.raises(ConfigError, match="is not a file"):
        build_tokenizer(flags(tokenizer_model=str(tmp_path / "absent.model")))
    text = tmp_path / "text.model"
    text.write_text("not a model")
    with pytest.raises(ConfigError, match="can't be read as a SentencePiece model"):
        build_tokenizer(flags(tokenizer_model=str(text)))


def test_null_tokenizer_adds_the_end_of_document():
    tokenizer = build_tokenizer(flags("NullTokenizer", vocab_size=100))
    assert (tokenizer.vocab_size, tokenizer.eod) == (101, 100)
    assert tokenizer.tokenize("3 1 99") == [3, 1, 99]


@pytest.mark.parametrize("vocab_size", [None, 0, -5])
def test_null_tokenizer_needs_a_vocab_size(vocab_size):
    with pytest.raises(ConfigError, match="--vocab-size"):
        build_tokenizer(flags("NullTokenizer", vocab_size=vocab_size))


def test_unknown_type_names_the_known_ones():
    with pytest.raises(ConfigError, match="NullTokenizer, SentencePieceTokenizer"):
        build_tokenizer(flags("GPT2BPETokenizer"))


@pytest.mark.parametrize(
    ("vocab_size", "divisor", "padded"),
    [
        (50257, 128, 50304),
        (128, 128, 128),
        (129, 128, 256),
        (2048, 1, 2048),
        (1, 128, 128),
    ],
)
def test_vocabulary_is_padded_as_in_megatron(vocab_size, divisor, padded):
    assert padded_vocab_size(vocab_size, divisor) == padded
