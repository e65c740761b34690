"""Turn the text of a JSON lines file into Megatron's indexed dataset of tokens.

    python tools/preprocess_data.py --input text.jsonl --json-keys text --output-prefix data/text \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 2

writes data/text_text_document.bin and .idx (PREFIX_KEY_document, a pair for each key), one document a line of input, in its
order. Give that name to --data-path of pretrain_gpt.py. The files appear under their names when they are whole, the .idx
last: a run that is ended halfway leaves nothing that looks like a dataset.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import numpy
from jsonl import BadLine, BadLineBudget, check_input, open_lines, parse_line, run_tool
from tqdm import tqdm

from megatron.pretrain.errors import ConfigError

# megatron-core is imported where it is used: that takes seconds, and a wrong flag should be answered before.

BATCH_LINES = 256
"""Lines that a worker gets at once: enough that handing them over costs little."""

PARTIAL = ".partial"
"""Ending of the output files that are not whole yet."""


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    group = parser.add_argument_group("input")
    group.add_argument("--input", required=True, help="file of JSON lines")
    group.add_argument("--json-keys", nargs="+", default=["text"], help="keys to take text from (default: text)")
    group.add_argument("--max-bad-lines", type=int, default=0, help="bad lines to skip before giving up (default: 0)")
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type", choices=("SentencePieceTokenizer", "NullTokenizer"), default="SentencePieceTokenizer",
        help="a SentencePiece model, or text that is token numbers with a space between (default: SentencePieceTokenizer)",
    )  # fmt: skip
    group.add_argument("--tokenizer-model", help="file of the SentencePiece model (.model)")
    group.add_argument("--vocab-size", type=int, help="number of tokens; NullTokenizer needs it")
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", required=True, help="path of the output without _KEY_document.bin and .idx")
    group.add_argument("--overwrite", action="store_true", help="replace a dataset that is there already")
    group = parser.add_argument_group("runtime")
    group.add_argument("--workers", type=int, default=1, help="processes that tokenize (default: 1, this one)")
    group.add_argument(
        "--log-interval", type=int, default=1000, help="documents between two lines of progress, off a terminal"
    )
    return parser.parse_args(argv)


def check_args(args: argparse.Namespace) -> None:
    check_input(args.input)
    for flag, value, least in (
        ("--workers", args.workers, 1),
        ("--log-interval", args.log_interval, 1),
        ("--max-bad-lines", args.max_bad_lines, 0),
    ):
        if value < least:
            raise ConfigError(f"{flag} {value} is too small: it must be at least {least}")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ConfigError(
            f"--json-keys {' '.join(args.json_keys)} names a key twice, and each key gets a dataset of its own"
        )
    for key in args.json_keys:
        existing = dataset_prefix(args, key) + ".idx"
        if os.path.exists(existing) and not args.overwrite:
            raise ConfigError(
                f"--output-prefix {args.output_prefix}: {existing} exists already; give another prefix, or --overwrite"
            )


def dataset_prefix(args: argparse.Namespace, key: str) -> str:
    return f"{args.output_prefix}_{key}_document"


@dataclass
class Encoder:
    """Lines to tokens. Each worker process makes one of its own: a tokenizer can't be sent."""

    args: argparse.Namespace

    def __post_init__(self) -> None:
        from megatron.core.datasets.indexed_dataset import DType

        from megatron.pretrain.tokenizer import build_tokenizer

        self.tokenizer = build_tokenizer(self.args)
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)

    def encode(self, line: bytes) -> list[numpy.ndarray]:
        """The tokens under each key; an empty text has none, and no end of document either. Raises BadLine."""
        return [self._tokens(text) for text in parse_line(line, self.args.json_keys)]

    def _tokens(self, text: str) -> numpy.ndarray:
        if not text:
            return numpy.empty(0, self.dtype)
        try:
            ids = self.tokenizer.tokenize(text)
        except ValueError as error:  # NullTokenizer reads numbers
            raise BadLine(f"text that --tokenizer-type {self.args.tokenizer_type} can't read ({error})") from error
        if ids and not 0 <= min(ids) <= max(ids) < self.tokenizer.vocab_size:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise BadLine(f"token {wrong} is not in the vocabulary of {self.tokenizer.vocab_size} tokens")
        if ids and self.args.append_eod:
            ids.append(self.tokenizer.eod)
        return numpy.array(ids, self.dtype)


@dataclass
class Encoded:
    """What became of one line: the tokens a key, or the reason why there are none."""

    number: int
    num_bytes: int
    tokens: list[numpy.ndarray] = field(default_factory=list)
    bad: str | None = None


def encode_lines(encoder: Encoder, lines: Iterable[tuple[int, bytes]]) -> Iterator[Encoded]:
    for number, line in lines:
        try:
            yield Encoded(number, len(line), encoder.encode(line))
        except BadLine as error:
            yield Encoded(number, len(line), bad=str(error))


_worker_encoder: Encoder
"""Of a worker process, set once when it starts: a module's name is all that its tasks can find."""


def _start_worker(args: argparse.Namespace) -> None:
    global _worker_encoder
    # Ctrl-C reaches the whole process group: the parent ends the run, and a worker then ends by itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder = Encoder(args)


def _end_with_parent() -> None:
    """Without this a worker would wait for work for ever when its parent is killed."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _work(lines: list[tuple[int, bytes]]) -> list[Encoded]:
    return list(encode_lines(_worker_encoder, lines))


def encode_in_workers(args: argparse.Namespace, lines: Iterator[tuple[int, bytes]]) -> Iterator[Encoded]:
    """As `encode_lines`, in `--workers` processes, in the order of the lines.

    Few batches are under way at a time, so that a file of any size passes through little memory.
    """
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    pending: deque[Future[list[Encoded]]] = deque()
    pool = ProcessPoolExecutor(args.workers, context, _start_worker, (args,))
    try:
        while batch := list(itertools.islice(lines, BATCH_LINES)):
            pending.append(pool.submit(_work, batch))
            if len(pending) > 2 * args.workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise ConfigError(
            f"a worker process ended by itself, most likely for lack of memory: lower --workers {args.workers}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class DatasetWriter:
    """The datasets of all keys, under temporary names until `finish`; leaving without it deletes them."""

    def __init__(self, args: argparse.Namespace, dtype: type[numpy.number]) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._prefixes = [dataset_prefix(args, key) for key in args.json_keys]
        self.num_documents = self.num_tokens = self.num_empty = 0
        os.makedirs(os.path.dirname(os.path.abspath(args.output_prefix)), exist_ok=True)
        self._builders = [IndexedDatasetBuilder(prefix + ".bin" + PARTIAL, dtype) for prefix in self._prefixes]

    def __enter__(self) -> DatasetWriter:
        return self

    def add(self, tokens: Sequence[numpy.ndarray]) -> None:
        """Append one document a key; a text without tokens makes none."""
        for builder, document in zip(self._builders, tokens):
            if document.size:
                builder.add_document(document, [document.size])
                self.num_documents += 1
                self.num_tokens += document.size
            else:
                self.num_empty += 1

    def finish(self) -> None:
        """Give the files their names: an old index goes first and the new ones come last, after all tokens."""
        for prefix, builder in zip(self._prefixes, self._builders):
            builder.finalize(prefix + ".idx" + PARTIAL)
        for path in self._paths():
            with open(path + PARTIAL, "rb") as file:
                # The names must not outlive a power cut that the content does not.
                os.fsync(file.fileno())
        for prefix in self._prefixes:
            with contextlib.suppress(FileNotFoundError):
                os.remove(prefix + ".idx")
        for path in self._paths():
            os.replace(path + PARTIAL, path)

    def _paths(self) -> list[str]:
        """The final names, the indices last."""
        return [prefix + ending for ending in (".bin", ".idx") for prefix in self._prefixes]

    def __exit__(self, *_: object) -> None:
        for builder in self._builders:
            # On a full disk closing fails too, and the files below still have to go.
            with contextlib.suppress(OSError):
                builder.data_file.close()
        for path in self._paths():
            with contextlib.suppress(FileNotFoundError):
                os.remove(path + PARTIAL)


class Progress:
    """A bar over the input's bytes on a terminal; elsewhere a line each `--log-interval` documents."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._interval, self._count, self._start = args.log_interval, 0, time.monotonic()
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=os.path.getsize(args.input), unit="B", unit_scale=True, desc="tokenizing", disable=not on_terminal
        )
        self._lines = not on_terminal

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, num_bytes: int) -> None:
        self._count += 1
        self._bar.update(num_bytes)
        if self._lines and self._count % self._interval == 0:
            self.say(f"processed {self._count} documents ({self.rate():.0f} docs/s)")

    def rate(self) -> float:
        """Documents a second since the start."""
        return self._count / max(time.monotonic() - self._start, 1e-9)

    def say(self, text: str) -> None:
        tqdm.write(text, file=sys.stderr)


def preprocess(args: argparse.Namespace) -> None:
    encoder = Encoder(args)  # made here in any case: a wrong tokenizer is found before workers start
    lines = open_lines(args.input)
    encoded = encode_lines(encoder, lines) if args.workers == 1 else encode_in_workers(args, lines)
    with Progress(args) as progress, DatasetWriter(args, encoder.dtype) as writer, contextlib.closing(encoded):
        bad_lines = BadLineBudget(args.input, args.max_bad_lines, progress.say)
        for line in encoded:
            if line.bad is None:
                writer.add(line.tokens)
            else:
                bad_lines.spend(line.number, line.bad)
            progress.advance(line.num_bytes)
        if not writer.num_tokens:
            raise ConfigError(f"--input {args.input} holds no text under --json-keys {' '.join(args.json_keys)}")
        writer.finish()
        names = ", ".join(f"{dataset_prefix(args, key)}.bin/.idx" for key in args.json_keys)
        progress.say(
            f"wrote {names}: {writer.num_documents} documents, {writer.num_tokens} tokens ({progress.rate():.0f} docs/s); "
            f"{writer.num_empty} empty texts and {bad_lines.count} bad lines skipped"
        )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    check_args(args)
    # Core's notes on optimizers, printed when it is imported, tell nothing here.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    preprocess(args)


def _end_by_signal(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    # Ended from outside, it still removes what it has half written.
    signal.signal(signal.SIGTERM, _end_by_signal)
    sys.exit(run_tool(main))
