"""Datasets and batches: megatron-core's GPT datasets, checked before they are built, and a loader that resumes exactly.

The order of samples is Megatron's: the dataset is read once from front to back (core shuffles its index, by the seed), and of
each `micro batch * data parallel size` consecutive samples every data parallel rank takes its own slice.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import DType, get_bin_path, get_idx_path
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from torch.utils.data import DataLoader, Dataset

from megatron.pretrain.config import Config, split_blend
from megatron.pretrain.errors import ConfigError

SCANNED_TOKENS = 16 * 2**20
"""Tokens at either end of a dataset that are compared with the vocabulary: a fraction of a second."""

CACHE_ERRORS = (OSError, EOFError, ValueError, pickle.UnpicklingError)
"""What reading a damaged .npy file, or writing one without room or permission, raises."""

NEEDED_FOR = {
    Split.train: ("training", "--split"),
    Split.valid: ("validation", "--split, or turn evaluation off with --eval-iters 0"),
    Split.test: ("test", "--split, or turn evaluation off with --eval-iters 0"),
}
"""What a split is for, and the flags that mend one that is empty."""


def build_datasets(
    config: Config,
    tokenizer: MegatronTokenizerBase,
    num_samples: Sequence[int],
    *,
    is_built_on_rank: Callable[[], bool] = lambda: True,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Return the (train, valid, test) datasets, each with at least as many samples as `num_samples` asks for.

    A sample is a dict of `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), all [seq_length]. None stands for
    a split of which no sample is asked, and for all three on a rank where `is_built_on_rank()` is false.

    Call it on every rank, with torch.distributed initialised: rank 0 writes the index files while the others wait in a
    barrier. Raises ConfigError before that, on every rank alike, where the files on disk can't be trained on.
    """
    data = config.data
    wanted = [Split(i) for i, count in enumerate(num_samples) if count > 0]
    blend = None if data.mock_data else split_blend(data.data_path)
    core_config = _core_config(config, tokenizer, blend)
    # A split that is not asked for is not built: core would never finish building one without documents.
    core_config.split_matrix = [
        bounds if Split(i) in wanted else None for i, bounds in enumerate(core_config.split_matrix)
    ]
    if blend is not None:
        indices = [read_index(prefix) for prefix in blend[0]]
        for index in indices:
            _check_vocabulary(index, tokenizer)
            _check_splits(index, core_config.split_matrix, wanted, data.split)
        core_config.path_to_cache = _cache_path(data.data_cache_path, indices)
    dataset_class = MockGPTDataset if data.mock_data else GPTDataset
    datasets = _build(dataset_class, list(num_samples), is_built_on_rank, core_config)
    _check_lengths(datasets, num_samples)
    return datasets


def _core_config(
    config: Config, tokenizer: MegatronTokenizerBase, blend: tuple[list[str], list[float] | None] | None
) -> GPTDatasetConfig:
    data = config.data
    return GPTDatasetConfig(
        random_seed=config.training.seed,
        sequence_length=config.model.seq_length,
        blend=blend,
        split=data.split,
        path_to_cache=data.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        # The attention core is causal by itself; a [seq, seq] mask a sample would only be carried about.
        create_attention_mask=False,
    )


def _build(
    dataset_class: type[GPTDataset],
    sizes: list[int],
    is_built_on_rank: Callable[[], bool],
    core_config: GPTDatasetConfig,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    builder = BlendedMegatronDatasetBuilder(dataset_class, sizes, is_built_on_rank, core_config)
    try:
        train, valid, test = builder.build()
    except AssertionError as error:
        if core_config.blend is None or core_config.blend[1] is not None or len(core_config.blend[0]) == 1:
            raise
        # Core weighs datasets by their sizes, and refuses a share that it rounds to nothing.
        raise ConfigError(
            f"--data-path {' '.join(core_config.blend[0])}: one of these is too small to be mixed by size: give weights, as "
            "WEIGHT PREFIX pairs"
        ) from error
    except Exception as error:
        # Core wraps an OSError of its index files in a bare Exception; numpy has errors of its own for a file whose writer was
        # ended halfway. Anything else is a fault of the program and goes on as it is.
        cause = error.__cause__ or error
        if core_config.path_to_cache is None or not isinstance(cause, CACHE_ERRORS):
            raise
        raise ConfigError(
            f"the dataset's index files in {core_config.path_to_cache} can't be written or read ({cause}): delete that folder "
            "if an earlier run was ended while it wrote them, or give another one with --data-cache-path"
        ) from error
    return train, valid, test


@dataclass(frozen=True, kw_only=True)
class DatasetIndex:
    """What the .idx file of one indexed dataset says."""

    prefix: str
    dtype: type[numpy.number]
    sequence_lengths: numpy.ndarray
    """Tokens a sequence, int32, mapped from the file."""

    @property
    def tokens(self) -> numpy.ndarray:
        """All tokens, mapped from the .bin file."""
        return numpy.memmap(get_bin_path(self.prefix), dtype=self.dtype, mode="r")


def read_index(prefix: str) -> DatasetIndex:
    """Open an indexed dataset's .idx file. Raises ConfigError where one of both files is missing, damaged or cut short.

    Core's own reader answers those with assertions and numpy's errors, some of them only when a sample is read.
    """
    idx_path, bin_path = get_idx_path(prefix), get_bin_path(prefix)
    for path in (idx_path, bin_path):
        if not os.path.isfile(path):
            raise ConfigError(
                f"--data-path {prefix}: {path} does not exist; give the prefix of a .bin and .idx pair, as "
                "tools/preprocess_data.py writes it (it ends in _text_document)"
            )
    remedy = "make the dataset again with tools/preprocess_data.py"
    header = struct.Struct("<9sQBQQ")
    size = os.path.getsize(idx_path)
    for path in (bin_path, idx_path):
        try:
            with open(path, "rb") as file:
                start = file.read(header.size)
        except OSError as error:
            raise ConfigError(f"--data-path {prefix}: {path} can't be read ({error.strerror})") from error
    if len(start) < header.size or not start.startswith(b"MMIDIDX\x00\x00"):
        raise ConfigError(f"--data-path {prefix}: {idx_path} is not the index of a Megatron dataset; {remedy}")
    _, version, code, num_sequences, num_documents = header.unpack(start)
    if version != 1 or code not in [dtype.value for dtype in DType]:
        raise ConfigError(
            f"--data-path {prefix}: {idx_path} has version {version} and type {code}, unknown here; {remedy}"
        )
    needed = header.size + num_sequences * (4 + 8) + num_documents * 8
    if size < needed:
        raise ConfigError(f"--data-path {prefix}: {idx_path} is cut short ({size} bytes of {needed}); {remedy}")
    if num_sequences == 0:
        raise ConfigError(f"--data-path {prefix} holds no documents; {remedy}")
    lengths = numpy.memmap(idx_path, dtype=numpy.int32, mode="r", offset=header.size, shape=(num_sequences,))
    index = DatasetIndex(prefix=prefix, dtype=DType.dtype_from_code(code), sequence_lengths=lengths)
    num_bytes = int(lengths.sum(dtype=numpy.int64)) * DType.size(index.dtype)
    if num_bytes == 0:
        raise ConfigError(f"--data-path {prefix} holds no tokens; {remedy}")
    if os.path.getsize(bin_path) != num_bytes:
        raise ConfigError(
            f"--data-path {prefix}: {bin_path} has {os.path.getsize(bin_path)} bytes where its index says {num_bytes}; {remedy}"
        )
    return index


def _check_vocabulary(index: DatasetIndex, tokenizer: MegatronTokenizerBase) -> None:
    """Raise ConfigError where the dataset holds tokens that the vocabulary lacks: it was made with another tokenizer."""
    if not issubclass(index.dtype, numpy.integer):
        raise ConfigError(f"--data-path {index.prefix} holds {index.dtype.__name__} numbers, and tokens are integers")
    tokens = index.tokens
    ends = (tokens[:SCANNED_TOKENS], tokens[-SCANNED_TOKENS:])
    lowest, highest = min(int(end.min()) for end in ends), max(int(end.max()) for end in ends)
    if lowest < 0:
        raise ConfigError(
            f"--data-path {index.prefix} holds token {lowest}, and tokens count from 0: make it again with "
            "tools/preprocess_data.py and a tokenizer that has an end-of-document token"
        )
    if highest >= tokenizer.vocab_size:
        raise ConfigError(
            f"--data-path {index.prefix} holds token {highest}, but the vocabulary has {tokenizer.vocab_size} tokens (0 to "
            f"{tokenizer.vocab_size - 1}): give the tokenizer that the dataset was made with (--tokenizer-model), or a larger "
            "--vocab-size with NullTokenizer"
        )


def _check_splits(
    index: DatasetIndex, split_matrix: list[tuple[float, float] | None], wanted: list[Split], split: str
) -> None:
    """Raise ConfigError where a wanted split has no tokens; core would add empty epochs for ever."""
    num_sequences = len(index.sequence_lengths)
    for part in wanted:
        bounds = split_matrix[part.value]
        begin, end = (int(round(bound * float(num_sequences))) for bound in bounds or (0.0, 0.0))
        if not index.sequence_lengths[begin:end].any():
            purpose, remedy = NEEDED_FOR[part]
            raise ConfigError(
                f"--split {split!r} leaves no document of --data-path {index.prefix} ({num_sequences} documents) for {purpose}: "
                f"raise that share in {remedy}"
            )


def _cache_path(data_cache_path: str | None, indices: list[DatasetIndex]) -> str:
    """The folder for core's index files: a new one whenever a dataset was made anew.

    Core names these files after the dataset's path and not after what is in it, so that a dataset made again under its old
    name would be read through the old index.
    """
    digest = hashlib.sha256()
    for index in indices:
        digest.update(_fingerprint(index.sequence_lengths))
    root = data_cache_path or os.path.join(indices[0].prefix, "cache")
    return os.path.join(root, f"GPTDataset_indices-{digest.hexdigest()[:16]}")


def _fingerprint(lengths: numpy.ndarray, pieces: int = 64, piece_size: int = 2**14) -> bytes:
    """A digest of a list of lengths: of all of it while it is short, else of pieces spread over it and of the sum.

    By content, not by time stamp: the copies of a dataset on several machines must agree.
    """
    digest = hashlib.sha256(struct.pack("<qq", len(lengths), int(lengths.sum(dtype=numpy.int64))))
    step = max(len(lengths) // pieces, piece_size)
    for start in range(0, len(lengths), step):
        digest.update(lengths[start : start + piece_size].tobytes())
    return digest.digest()


def _check_lengths(datasets: Sequence[Dataset | None], num_samples: Sequence[int]) -> None:
    for part, dataset, count in zip(Split, datasets, num_samples):
        if dataset is not None and len(dataset) < count:
            # Core repeats one dataset, or a weighted blend, as often as it takes; a blend without weights never.
            raise ConfigError(
                f"--data-path holds {len(dataset)} {part.name} samples, and {count} are needed: give weights (WEIGHT PREFIX …), "
                "so that datasets may repeat, or lower --train-iters or --eval-iters"
            )


class SequentialBatches:
    """A batch sampler: lists of dataset indices, one microbatch of one data parallel rank each."""

    def __init__(
        self,
        *,
        num_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        assert 0 <= data_parallel_rank < data_parallel_size and micro_batch_size > 0 and consumed_samples >= 0
        self._num_samples, self._consumed_samples = num_samples, consumed_samples
        self._group_size = micro_batch_size * data_parallel_size
        self._first, self._micro_batch_size = data_parallel_rank * micro_batch_size, micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self._consumed_samples, self._num_samples, self._group_size):
            if start + self._group_size > self._num_samples:
                return
            begin = start + self._first
            batch = list(range(begin, min(begin + self._micro_batch_size, self._num_samples)))
            if batch:
                yield batch


def batch_iterator(
    dataset: Dataset,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's microbatches as dicts of tensors [micro batch, seq_length], from sample `consumed_samples` on.

    Samples are taken in the dataset's order. A run that stopped after `consumed_samples` samples, over all data parallel ranks,
    continues with exactly the batches that it would have had. It ends with the dataset; with `drop_last` false its last batch
    may be short, or missing on some ranks.
    """
    batches = SequentialBatches(
        num_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # A loader seeds its workers from the global generator, which would shift every number drawn after it.
        generator=torch.Generator(),
    )
    return iter(loader)
