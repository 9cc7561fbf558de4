"""Every token once an epoch, in an order that depends on the seed alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train import train_runs

from mfubench.config import ConfigError, RunConfig
from mfubench.train.loader import Batches, SequenceOrder, StepBatches
from mfubench.train.process import Process

CPU = torch.device("cpu")


def tiny_config(**overrides) -> RunConfig:
    """With a row for each of CountingTokens' ids."""
    return train_runs.tiny_config(model={"vocab_size": 2**31 - 1}, **overrides)


class CountingTokens:
    """Token i is i: a batch shows where it was read."""

    def __init__(self, num_tokens: int):
        self.num_tokens = num_tokens

    def read(self, start: int, count: int) -> np.ndarray:
        assert start >= 0 and start + count <= self.num_tokens
        return np.arange(start, start + count, dtype=np.int64)


@settings(deadline=None, max_examples=60)
@given(sequences=st.integers(1, 5000), seed=st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(sequences, seed):
    order = SequenceOrder(sequences, seed)
    for epoch in (0, 1, 7):
        numbers = order(np.arange(epoch * sequences, (epoch + 1) * sequences))
        assert np.array_equal(np.sort(numbers), np.arange(sequences))


def test_epochs_and_seeds_have_orders_of_their_own():
    first, second = SequenceOrder(1000, 1)(np.arange(2000)).reshape(2, 1000)
    other_seed = SequenceOrder(1000, 2)(np.arange(1000))
    for left, right in ((first, second), (first, other_seed), (first, np.arange(1000))):
        assert np.mean(left == right) < 0.02  # about 1 of 1000 agrees by chance


def test_the_order_looks_random():
    numbers = SequenceOrder(100_000, 5)(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers, np.arange(100_000))[0, 1]) < 0.02


def test_order_does_not_depend_on_how_positions_are_grouped():
    order = SequenceOrder(317, 9)
    whole = order(np.arange(1000))
    assert np.array_equal(whole, np.concatenate([order(np.arange(start, start + 50)) for start in range(0, 1000, 50)]))


def test_billions_of_sequences_need_no_table():
    numbers = SequenceOrder(3 * 10**11, 0)(np.arange(1000))
    assert len(set(numbers.tolist())) == 1000
    assert numbers.max() > 10**11


def starts(config, first_position: int, steps: int) -> list[list[int]]:
    """First tokens of the sequences that the ranks together see, step by step."""
    tokens = CountingTokens(5000)
    seen = []
    readers = [StepBatches(tokens, config, rank, first_position, steps) for rank in range(config.world_size)]
    for step in range(steps):
        batches = [reader[step] for reader in readers]
        assert all(torch.equal(batch[..., 1:], batch[..., :-1] + 1) for batch in batches)
        seen.append(sorted(int(start) for batch in batches for start in batch[..., 0].flatten()))
    return seen


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "accumulation"), [(1, 4, 2), (2, 4, 1), (2, 1, 4), (4, 2, 1), (8, 1, 1)]
)
def test_any_split_of_a_global_batch_sees_the_same_sequences(world_size, micro_batch_size, accumulation):
    config = tiny_config(
        world_size=world_size, micro_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation
    )
    assert starts(config, 0, 60) == starts(tiny_config(micro_batch_size=8), 0, 60)


def test_every_token_is_read_once_an_epoch():
    config = tiny_config(world_size=2, micro_batch_size=2, gradient_accumulation_steps=2)
    sequences = 4999 // 16  # 312 = 39 steps of 8
    seen = sorted(start for step in starts(config, 0, sequences // 8) for start in step)
    assert seen == list(range(0, sequences * 16, 16))


def test_a_resume_goes_on_at_the_next_unread_position():
    config = tiny_config(micro_batch_size=8)
    whole = starts(config, 0, 50)
    assert starts(config, 20 * 8, 30) == whole[20:]
    other_split = tiny_config(world_size=2, micro_batch_size=2)  # global batch 4
    rest = starts(other_split, 20 * 8, 60)
    assert [sorted(rest[i] + rest[i + 1]) for i in range(0, 60, 2)] == whole[20:]


@pytest.mark.parametrize("first_position", [0, 24])
def test_both_loaders_give_the_same_batches(data, first_position):
    from mfubench.data.reader import TokenDataset

    tokens = TokenDataset.open(data, "train")
    process = Process(rank=1, world_size=2, local_rank=1, device=CPU)
    options = {"world_size": 2, "micro_batch_size": 2, "gradient_accumulation_steps": 2}
    memmap = Batches(tokens, tiny_config(**options), process, first_position, steps=7)
    loader = {"kind": "dataloader", "num_workers": 2, "prefetch_factor": 2}
    workers = Batches(tokens, tiny_config(loader=loader, **options), process, first_position, steps=7)
    for _ in range(7):
        expected, found = memmap.next(), workers.next()
        assert torch.equal(expected[0], found[0])
        assert torch.equal(expected[1], found[1])
        assert expected[0].shape == (2, 2, 16)
        assert torch.equal(expected[0][..., 1:], expected[1][..., :-1])


def test_too_few_tokens_are_an_error_with_both_numbers():
    with pytest.raises(ConfigError, match=r"16 tokens.*16 \+ 1"):
        StepBatches(CountingTokens(16), tiny_config(), 0, 0, 1)


@pytest.mark.parametrize("loader", [{}, {"kind": "dataloader", "num_workers": 1}], ids=["memmap", "dataloader"])
def test_an_id_beyond_the_models_rows_is_told_before_it_reaches_the_device(loader):
    config = train_runs.tiny_config(loader=loader, model={"vocab_size": 97}, gradient_accumulation_steps=1)
    batches = Batches(CountingTokens(16 * 8 + 1), config, Process(0, 1, 0, CPU), 0, steps=2)
    with pytest.raises(ConfigError, match=r"holds token id 128, but the model has 97 rows"):
        batches.next()
