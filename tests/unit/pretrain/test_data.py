"""Datasets and batches: order and resuming, and data that can't be trained on as one clear error before it is built."""

import dataclasses
import os
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.pretrain.config import DataConfig
from megatron.pretrain.data import batch_iterator, build_datasets, read_index
from megatron.pretrain.errors import ConfigError
from megatron.pretrain.tokenizer import build_tokenizer

SEQ_LENGTH = 8
VOCAB_SIZE = 1000
NUM_DOCUMENTS = 60
DOCUMENT_LENGTH = 11


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    """One process over gloo: core's builder synchronises ranks."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write_dataset(prefix, documents, dtype=numpy.uint16) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def numbered_documents(count=NUM_DOCUMENTS, start=0):
    """Documents whose tokens count on, so that every token tells where it stood."""
    return [numpy.arange(start + i * DOCUMENT_LENGTH, start + (i + 1) * DOCUMENT_LENGTH) for i in range(count)]


@pytest.fixture
def prefix(tmp_path) -> str:
    return write_dataset(tmp_path / "text_document", numbered_documents())


def make_config(data_path=None, seed=1234, **data):
    data = {"tokenizer_type": "NullTokenizer", "vocab_size": VOCAB_SIZE, "split": "80,10,10"} | data
    data |= {"mock_data": True} if data_path is None else {"data_path": data_path}
    return SimpleNamespace(
        model=SimpleNamespace(seq_length=SEQ_LENGTH), training=SimpleNamespace(seed=seed), data=DataConfig(**data)
    )


def build(config, num_samples=(20, 4, 4), **options):
    return build_datasets(config, build_tokenizer(config.data), num_samples, **options)


def tokens_of(dataset) -> list[list[int]]:
    return [dataset[i]["tokens"].tolist() for i in range(len(dataset))]


def test_samples_have_the_documented_shapes_and_types(prefix):
    sample = build(make_config([prefix]))[0][0]
    types = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in sample.items()}
    integers = (torch.int64, (SEQ_LENGTH,))
    assert types == {
        "tokens": integers, "labels": integers, "position_ids": integers, "loss_mask": (torch.float32, (SEQ_LENGTH,)),
    }  # fmt: skip


def test_labels_are_the_next_tokens(prefix):
    train = build(make_config([prefix]))[0]
    for i in range(len(train)):
        assert train[i]["tokens"][1:].tolist() == train[i]["labels"][:-1].tolist()


def test_splits_share_no_document(prefix):
    splits = build(make_config([prefix]), (48, 6, 6))
    documents = [{token // DOCUMENT_LENGTH for sample in tokens_of(split) for token in sample} for split in splits]
    assert documents[0] == set(range(48))
    assert documents[1] <= set(range(48, 54))
    assert documents[2] <= set(range(54, 60))


def test_dataset_repeats_until_there_are_enough_samples(prefix):
    num_samples = 5 * NUM_DOCUMENTS * DOCUMENT_LENGTH // SEQ_LENGTH
    train, valid, test = build(make_config([prefix]), (num_samples, 100, 1))
    assert len(train) >= num_samples and len(valid) >= 100 and len(test) >= 1


def test_the_seed_decides_the_order(prefix):
    first, again, other = (tokens_of(build(make_config([prefix], seed=seed))[0]) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_split_without_samples_is_not_built(prefix):
    train, valid, test = build(make_config([prefix], split="100,0,0"), (20, 0, 0))
    assert len(train) >= 20
    assert valid is None and test is None


def test_ranks_that_need_no_data_get_none(prefix):
    assert build(make_config([prefix]), is_built_on_rank=lambda: False) == (None, None, None)


def test_weighted_blend_draws_by_weight(tmp_path):
    first = write_dataset(tmp_path / "a", numbered_documents(30))
    second = write_dataset(tmp_path / "b", numbered_documents(30, start=500))
    train = build(make_config(["0.75", first, "0.25", second]), (40, 4, 4))[0]
    from_second = sum(train[i]["tokens"][0] >= 500 for i in range(40))
    assert from_second == 10


def test_blend_without_weights_that_is_too_small_is_refused(tmp_path):
    prefixes = [write_dataset(tmp_path / name, numbered_documents(30)) for name in "ab"]
    with pytest.raises(ConfigError, match=r"holds \d+ train samples, and 500 are needed: give weights"):
        build(make_config(prefixes), (500, 4, 4))


def test_mock_data_is_made_without_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train, valid, test = build(make_config(vocab_size=60), (12, 4, 0))
    assert train[0]["tokens"].max() <= 60
    assert len(train) >= 12 and len(valid) >= 4 and test is None
    assert os.listdir(tmp_path) == []


def test_eod_flags_reach_the_dataset(tmp_path):
    eod = VOCAB_SIZE
    documents = [numpy.array([1, 2, 3, eod])] * 40
    config = make_config([write_dataset(tmp_path / "text", documents)], eod_mask_loss=True, reset_position_ids=True)
    sample = build(config)[0][0]
    is_eod = sample["tokens"] == eod
    assert is_eod.any()
    assert (sample["loss_mask"] == (~is_eod).float()).all()
    assert sample["position_ids"].max() == 3


class TestBadData:
    def test_missing_file(self, tmp_path):
        with pytest.raises(ConfigError, match=r"--data-path .*absent: .*absent.idx does not exist"):
            build(make_config([str(tmp_path / "absent")]))

    def test_missing_bin(self, prefix):
        os.remove(prefix + ".bin")
        with pytest.raises(ConfigError, match=r"\.bin does not exist"):
            build(make_config([prefix]))

    def test_index_of_another_kind(self, prefix):
        with open(prefix + ".idx", "wb") as file:
            file.write(b"something else entirely, but long enough for a header")
        with pytest.raises(ConfigError, match="not the index of a Megatron dataset"):
            read_index(prefix)

    @pytest.mark.parametrize("keep", [0, 20, 34, 100])
    def test_index_cut_short(self, prefix, keep):
        os.truncate(prefix + ".idx", keep)
        with pytest.raises(ConfigError, match="not the index|cut short"):
            read_index(prefix)

    def test_tokens_cut_short(self, prefix):
        os.truncate(prefix + ".bin", 100)
        with pytest.raises(ConfigError, match=r"has 100 bytes where its index says 1320"):
            read_index(prefix)

    def test_no_documents(self, tmp_path):
        with pytest.raises(ConfigError, match="holds no documents"):
            read_index(write_dataset(tmp_path / "empty", []))

    def test_token_outside_the_vocabulary(self, prefix):
        highest = NUM_DOCUMENTS * DOCUMENT_LENGTH - 1
        with pytest.raises(ConfigError, match=f"holds token {highest}, but the vocabulary has 101 tokens"):
            build(make_config([prefix], vocab_size=100))

    def test_negative_token(self, tmp_path):
        prefix = write_dataset(tmp_path / "text", [numpy.array([1, 2, -1])] * 20, numpy.int32)
        with pytest.raises(ConfigError, match="holds token -1, and tokens count from 0"):
            build(make_config([prefix]))

    @pytest.mark.parametrize(
        ("split", "message"),
        [("100,0,0", "validation.*--eval-iters 0"), ("99.9,0.1,0", "validation"), ("90,10,0", "for test")],
    )
    def test_empty_split(self, prefix, split, message):
        with pytest.raises(ConfigError, match=f"--split '{split}' leaves no document .*{message}"):
            build(make_config([prefix], split=split))


class TestIndexCache:
    def test_lies_beside_the_dataset_or_where_it_is_told(self, prefix, tmp_path):
        build(make_config([prefix]))
        assert os.path.isdir(os.path.join(prefix, "cache"))
        elsewhere = tmp_path / "elsewhere"
        build(make_config([prefix], data_cache_path=str(elsewhere)))
        assert len(list(elsewhere.glob("GPTDataset_indices-*/*.npy"))) == 9

    def test_dataset_made_again_is_not_read_through_the_old_index(self, prefix):
        build(make_config([prefix]))
        longer = [numpy.full(DOCUMENT_LENGTH + i % 3, i) for i in range(NUM_DOCUMENTS)]
        write_dataset(prefix, longer)
        fresh = write_dataset(prefix + "_copy", longer)
        assert tokens_of(build(make_config([prefix]))[0]) == tokens_of(build(make_config([fresh]))[0])

    def test_file_cut_short_names_the_folder(self, prefix, tmp_path):
        config = make_config([prefix], data_cache_path=str(tmp_path / "cache"))
        build(config)
        for path in (tmp_path / "cache").glob("*/*shuffle_index.npy"):
            os.truncate(path, 130)
        with pytest.raises(
            ConfigError, match=r"index files in .*cache.* can't be written or read .*delete that folder"
        ):
            build(config)


class Counting(torch.utils.data.Dataset):
    """A dataset whose samples are their own numbers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.tensor([index, index])}


def batches(size=20, consumed=0, micro=2, rank=0, ranks=1, **options) -> list[list[int]]:
    iterator = batch_iterator(
        Counting(size),
        consumed_samples=consumed,
        micro_batch_size=micro,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        **options,
    )
    return [batch["tokens"][:, 0].tolist() for batch in iterator]


class TestBatchOrder:
    def test_one_rank_reads_front_to_back(self):
        assert batches(size=7, micro=2) == [[0, 1], [2, 3], [4, 5]]

    def test_ranks_take_slices_of_each_group(self):
        assert batches(size=14, micro=2, ranks=3, rank=0) == [[0, 1], [6, 7]]
        assert batches(size=14, micro=2, ranks=3, rank=1) == [[2, 3], [8, 9]]
        assert batches(size=14, micro=2, ranks=3, rank=2) == [[4, 5], [10, 11]]

    @pytest.mark.parametrize("consumed", [0, 6, 12])
    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_resumed_order_is_the_rest_of_the_whole(self, consumed, rank):
        whole = batches(size=26, micro=2, ranks=3, rank=rank)
        assert batches(size=26, micro=2, ranks=3, rank=rank, consumed=consumed) == whole[consumed // 6 :]

    def test_resume_with_other_sizes_goes_on_at_the_same_sample(self):
        assert batches(size=12, micro=3, ranks=2, rank=1, consumed=5) == [[8, 9, 10]]

    def test_slices_are_disjoint_and_complete(self):
        seen = [
            index for rank in range(4) for batch in batches(size=24, micro=3, ranks=4, rank=rank) for index in batch
        ]
        assert sorted(seen) == list(range(24))

    def test_nothing_is_left_after_the_last_sample(self):
        assert batches(size=8, consumed=8) == []

    def test_order_equals_megatrons_sampler(self):
        """Megatron gathers samples one by one and cuts each full group; done here the long way."""
        for size, consumed, micro, ranks in [(37, 0, 2, 2), (37, 8, 1, 4), (40, 12, 3, 2)]:
            for rank in range(ranks):
                group, expected = [], []
                for index in range(consumed, size):
                    group.append(index)
                    if len(group) == micro * ranks:
                        expected.append(group[rank * micro : (rank + 1) * micro])
                        group = []
                assert batches(size, consumed, micro, rank, ranks) == expected

    def test_workers_keep_the_order(self):
        assert batches(size=9, micro=2, num_workers=1) == batches(size=9, micro=2)

    def test_random_numbers_of_the_run_are_left_alone(self):
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        batches()
        assert torch.equal(torch.rand(3), expected)


def test_batches_of_a_real_dataset_resume(prefix):
    def read(consumed):
        train = build(make_config([prefix]), (40, 0, 0))[0]
        options = {"micro_batch_size": 2, "data_parallel_rank": 1, "data_parallel_size": 2}
        return list(batch_iterator(train, consumed_samples=consumed, **options))

    whole, rest = read(0), read(12)
    assert whole[0]["tokens"].shape == (2, SEQ_LENGTH)
    assert len(rest) == len(whole) - 3
    for expected, got in zip(whole[3:], rest):
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_data_config_fields_are_all_used():
    """A flag that the data code never reads would be accepted and ignored."""
    with open(os.path.join(os.path.dirname(os.path.abspath(build_datasets.__code__.co_filename)), "data.py")) as file:
        source = file.read()
    elsewhere = {"tokenizer_type", "tokenizer_model", "vocab_size", "num_workers"}
    unread = [
        f.name for f in dataclasses.fields(DataConfig) if f.name not in elsewhere and f"data.{f.name}" not in source
    ]
    assert unread == []
