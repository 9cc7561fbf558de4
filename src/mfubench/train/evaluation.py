"""Loss on the validation tokens, and a few tokens sampled from the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from mfubench.config import RunConfig
from mfubench.data.reader import TokenDataset
from mfubench.model import Decoder
from mfubench.run_log import Evaluation
from mfubench.train.loader import Tokens, count_sequences
from mfubench.train.process import Process


@torch.no_grad()
def evaluate(model: Decoder, tokens: Tokens, config: RunConfig, process: Process, step: int) -> Evaluation:
    """Mean loss over `evaluation.iters` micro-batches a rank, the same ones each time. Collective.

    The ranks share out the first iters * world_size * micro_batch_size sequences, starting over where there are fewer.
    """
    B, T = config.micro_batch_size, config.seq_len
    sequences = count_sequences(tokens, T)
    total = torch.zeros((), device=process.device)
    for batch in range(config.evaluation.iters):
        first = (batch * process.world_size + process.rank) * B
        numbers = np.arange(first, first + B) % sequences
        rows = torch.from_numpy(np.stack([tokens.read(int(number) * T, T + 1) for number in numbers]))  # [B, T + 1]
        rows = rows.to(process.device)
        total += model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    loss = process.sum_(total).item() / (config.evaluation.iters * process.world_size)
    return Evaluation(step=step, loss=loss, tokens=config.evaluation.iters * process.world_size * B * T)


def sample(model: Decoder, tokens: TokenDataset, config: RunConfig, process: Process, tokenizer: Path | None) -> str:
    """`sample_tokens` tokens after an end-of-document token, as text or, without a tokenizer, as ids. Collective."""
    prompt = torch.tensor([[tokens.eos_id]], device=process.device)  # [1, 1]
    generator = torch.Generator(process.device).manual_seed(config.seed)
    ids = model.generate(prompt, config.sample_tokens, generator=generator)[0, 1:].tolist()
    if tokenizer is None:
        return " ".join(map(str, ids))
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode(ids)
