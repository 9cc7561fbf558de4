"""Which sequences a step sees, and how they get to the device.

The data is cut into N = (tokens - 1) // seq_len sequences. Their order in an epoch is a permutation that depends on
seed and epoch alone; epochs follow one another in one endless stream of positions. A step takes the next
global_batch_size positions, and micro-step m of rank r takes its B of them from (m * world_size + r) * B on: however a
global batch is split, it holds the same sequences, and a resume goes on at the next unread position.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mfubench.config import ConfigError, RunConfig
from mfubench.train.process import Process

ROUNDS = 6  # of the Feistel network: 4 make a pseudorandom permutation, two more cost nothing


class Tokens(Protocol):
    """The part of data.reader.TokenDataset that is used here."""

    num_tokens: int

    def read(self, start: int, count: int) -> np.ndarray: ...


class SequenceOrder:
    """Endless positions -> sequence numbers: in each epoch a keyed permutation of range(sequences).

    A Feistel network over the next power of four, walked until it lands below `sequences` (Black and Rogaway, "Ciphers
    with arbitrary finite domains", 2002): no table, so memory and start-up do not grow with the data.
    """

    def __init__(self, sequences: int, seed: int):
        self.sequences = sequences
        self.seed = np.uint64(seed)
        self.half_bits = max(1, ((sequences - 1).bit_length() + 1) // 2)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Sequence numbers of positions, int64 -> int64, same shape."""
        epochs, within = np.divmod(positions, self.sequences)
        keys = mix(mix(self.seed) + epochs.astype(np.uint64))
        numbers = self.encrypt(within.astype(np.uint64), keys)
        while (outside := numbers >= self.sequences).any():
            numbers[outside] = self.encrypt(numbers[outside], keys[outside])
        return numbers.astype(np.int64)

    def encrypt(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        half, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = numbers >> half, numbers & mask
        for turn in range(ROUNDS):
            left, right = right, left ^ (mix(keys + mix(right + np.uint64(turn << 32))) & mask)
        return (left << half) | right


def mix(values: Any) -> Any:
    """Scramble uint64 values (the finaliser of SplitMix64: Steele, Lea, Flood, 2014)."""
    values = np.atleast_1d(values) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class StepBatches(Dataset[Tensor]):
    """Item k: the tokens [A, B, T + 1] of the k-th step from `first_position` on, of one rank."""

    def __init__(self, tokens: Tokens, config: RunConfig, rank: int, first_position: int, steps: int):
        self.tokens, self.config, self.rank = tokens, config, rank
        self.first_position, self.steps = first_position, steps
        self.order = SequenceOrder(count_sequences(tokens, config.seq_len), config.seed)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Tensor:
        config = self.config
        A, B, T = config.gradient_accumulation_steps, config.micro_batch_size, config.seq_len
        first = self.first_position + step * config.global_batch_size
        micro_steps = np.arange(A)[:, None] * config.world_size * B  # [A, 1]
        positions = first + micro_steps + self.rank * B + np.arange(B)  # [A, B]
        numbers = self.order(positions.reshape(-1))
        rows = np.stack([self.tokens.read(int(number) * T, T + 1) for number in numbers])
        if (largest := int(rows.max())) >= config.model.vocab_size:  # on a GPU it would end the process without a word
            raise ConfigError(
                f"dataset {config.dataset}: holds token id {largest}, but the model has {config.model.vocab_size} rows "
                "(model.vocab_size) and the data's meta.json allows no more: the token file is damaged, prepare it anew"
            )
        return torch.from_numpy(rows.reshape(A, B, T + 1))


def count_sequences(tokens: Tokens, seq_len: int) -> int:
    """Sequences of seq_len tokens whose every token has a successor. Raises ConfigError where there is none."""
    sequences = (tokens.num_tokens - 1) // seq_len
    if sequences < 1:
        raise ConfigError(f"the dataset has {tokens.num_tokens} tokens, too few for one sequence of {seq_len} + 1")
    return sequences


class Batches:
    """The batches of a run on the device, one step ahead of the training.

    memmap reads the next step's tokens in this process while the device computes; dataloader has workers do it. Both
    give the same batches, bit for bit.
    """

    def __init__(self, tokens: Tokens, config: RunConfig, process: Process, first_position: int, steps: int):
        self.process = process
        dataset = StepBatches(tokens, config, process.rank, first_position, steps)
        if config.loader.kind == "memmap":
            self.source: Iterator[Tensor] = read_in_process(dataset, pin=process.on_cuda)
        else:
            loader = DataLoader(
                dataset,
                batch_size=None,  # an item is a step's batch already
                num_workers=config.loader.num_workers,
                prefetch_factor=config.loader.prefetch_factor,
                persistent_workers=True,
                pin_memory=process.on_cuda,
            )
            self.source = iter(loader)
        self.copies = torch.cuda.Stream(process.device) if process.on_cuda else None
        self.ahead: tuple[Tensor, Tensor] | None = None

    def next(self) -> tuple[Tensor, Tensor, float]:
        """inputs, labels [A, B, T] int64 on the device, and the seconds waited for them on the host."""
        waited = self.prefetch() if self.ahead is None else 0.0
        assert self.ahead is not None
        inputs, labels = self.ahead
        self.ahead = None
        if self.copies is not None:
            stream = torch.cuda.current_stream()
            stream.wait_stream(self.copies)
            inputs.record_stream(stream)
            labels.record_stream(stream)
        return inputs, labels, waited

    def prefetch(self) -> float:
        """Take the next batch from the source and begin copying it to the device; returns the seconds that took."""
        t0 = time.perf_counter()
        tokens = next(self.source, None)
        if tokens is None:
            return 0.0
        with torch.cuda.stream(self.copies):
            tokens = tokens.to(self.process.device, non_blocking=True)
            self.ahead = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        return time.perf_counter() - t0


def read_in_process(dataset: StepBatches, pin: bool) -> Iterator[Tensor]:
    for step in range(len(dataset)):
        tokens = dataset[step]
        yield tokens.pin_memory() if pin else tokens
