"""Train a SentencePiece tokenizer on the text of a JSON lines file.

    python tools/train_tokenizer.py --input text.jsonl --json-keys text --vocab-size 2048 --output-prefix tokenizer

writes tokenizer.model, for --tokenizer-model, and tokenizer.vocab, to read. The same input and flags give the same
files. Text goes in as it is (no Unicode normalisation, spaces kept), digits are split, and the token <|endoftext|>,
which no text can spell, ends a document: megatron-core takes it for `eod`.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence

import sentencepiece
from jsonl import BadLine, BadLineBudget, check_input, open_lines, parse_line, run_tool

from megatron.pretrain.errors import ConfigError

END_OF_DOCUMENT = "<|endoftext|>"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", required=True, help="file of JSON lines")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], help="keys whose text is learned from (default: text)"
    )
    parser.add_argument("--output-prefix", required=True, help="path of the two files without .model and .vocab")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of tokens, the special ones included")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="kind of model (default: bpe)")
    parser.add_argument(
        "--byte-fallback",
        action="store_true",
        help="spell characters that are not in the vocabulary in 256 byte tokens",
    )
    parser.add_argument(
        "--character-coverage", type=float, default=1.0,
        help="share of the text's characters that the vocabulary covers (default: 1.0; less leaves rare ones out)",
    )  # fmt: skip
    parser.add_argument("--max-bad-lines", type=int, default=0, help="bad lines to skip before giving up (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace the files of an earlier run")
    return parser.parse_args(argv)


def texts(args: argparse.Namespace) -> Iterator[str]:
    """Yield the text under every key of every line; bad lines are counted."""
    bad_lines = BadLineBudget(args.input, args.max_bad_lines, lambda text: print(text, file=sys.stderr))
    for number, line in open_lines(args.input):
        try:
            yield from parse_line(line, args.json_keys)
        except BadLine as error:
            bad_lines.spend(number, str(error))


def train(args: argparse.Namespace) -> bytes:
    """The trained model file. One thread and no sampling, so that a run can be repeated."""
    model = io.BytesIO()
    problem: list[ConfigError] = []

    def sentences() -> Iterator[str]:
        # SentencePiece ends the process when its iterator raises: end the text instead and raise afterwards.
        try:
            yield from texts(args)
        except ConfigError as error:
            problem.append(error)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences(), model_writer=model, vocab_size=args.vocab_size, model_type=args.model_type,
            byte_fallback=args.byte_fallback, character_coverage=args.character_coverage, num_threads=1,
            shuffle_input_sentence=False, max_sentence_length=2**30, normalization_rule_name="identity",
            remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, split_digits=True,
            unk_id=0, eos_id=1, eos_piece=END_OF_DOCUMENT, bos_id=-1, pad_id=-1, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        raise (problem[0] if problem else _explain(args, str(error))) from error
    if problem:
        raise problem[0]
    return model.getvalue()


def vocabulary(model: bytes) -> str:
    """The tokens and their scores, a line each, in the order of their ids."""
    tokens = sentencepiece.SentencePieceProcessor(model_proto=model)
    return "".join(f"{tokens.id_to_piece(i)}\t{tokens.get_score(i):g}\n" for i in range(tokens.get_piece_size()))


def write_whole(path: str, content: bytes) -> None:
    """Write a file that is either whole or not there."""
    partial = path + ".partial"
    with open(partial, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def _explain(args: argparse.Namespace, message: str) -> ConfigError:
    """SentencePiece's failure in the words of this tool's flags."""
    if found := re.search(r"too high \(\d+\).*<= (\d+)", message):
        return ConfigError(
            f"--vocab-size {args.vocab_size} is more than --input {args.input} can fill: at most {found[1]} with "
            f"--model-type {args.model_type}; lower it, or give more text"
        )
    if found := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return ConfigError(
            f"--vocab-size {args.vocab_size} is smaller than the {found[1]} characters and special tokens of --input "
            f"{args.input}: raise it, or lower --character-coverage"
        )
    if "sentences_.empty()" in message:
        return ConfigError(f"--input {args.input} has no text under --json-keys {' '.join(args.json_keys)}: check both")
    return ConfigError(
        f"SentencePiece can't train on --input {args.input} with --vocab-size {args.vocab_size}: {message}"
    )


def check_args(args: argparse.Namespace) -> None:
    check_input(args.input)
    if args.vocab_size < 3:
        raise ConfigError(f"--vocab-size {args.vocab_size} is too small: the special tokens alone take 2")
    if not 0.98 <= args.character_coverage <= 1:
        raise ConfigError(f"--character-coverage {args.character_coverage} is not between 0.98 and 1")
    if os.path.exists(args.output_prefix + ".model") and not args.overwrite:
        raise ConfigError(
            f"--output-prefix {args.output_prefix}: {args.output_prefix}.model exists already; give another prefix, or --overwrite"
        )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    check_args(args)
    model = train(args)
    os.makedirs(os.path.dirname(os.path.abspath(args.output_prefix)), exist_ok=True)
    # The model last: once it is there, both files are whole.
    write_whole(args.output_prefix + ".vocab", vocabulary(model).encode())
    write_whole(args.output_prefix + ".model", model)
    print(f"wrote {args.output_prefix}.model: {args.vocab_size} tokens ({args.model_type})", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(run_tool(main))
