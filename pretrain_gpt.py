"""Pre-train a GPT on pipeline ranks.

    torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 ...

`--help` lists the flags; examples/pretrain_gpt_cpu.sh is a whole run. To train another model, change the functions here:
`model_provider` makes one pipeline stage, `datasets_provider` the data, `forward_step` one microbatch of one stage.
What needs torch is imported when it is used, so that a mistake in the flags is answered at once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.pretrain.config import Config, world_size
from megatron.pretrain.failure import run_rank
from megatron.pretrain.fit import check
from megatron.pretrain.flags import parse

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from torch import Tensor, nn

    from megatron.pipeline_parallel.planning.op import Placement


def model_provider(config: Config, stage: int, placement: Placement) -> GPTModel:
    """The GPT layers of one stage of the pipeline."""
    from megatron.pretrain.model import build_stage
    from megatron.pretrain.tokenizer import build_tokenizer, padded_vocab_size

    vocab_size = padded_vocab_size(build_tokenizer(config.data).vocab_size, config.model.make_vocab_size_divisible_by)
    return build_stage(config, stage=stage, placement=placement, vocab_size=vocab_size)


def datasets_provider(config: Config, num_samples: Sequence[int], needs_data: Callable[[], bool]) -> Sequence[Any]:
    """The training, validation and test sets, on ranks that need data."""
    from megatron.pretrain.data import build_datasets
    from megatron.pretrain.tokenizer import build_tokenizer

    return build_datasets(config, build_tokenizer(config.data), num_samples, is_built_on_rank=needs_data)


def get_batch(data_iterator: Iterator | None) -> dict[str, Tensor | None]:
    """The next microbatch on this rank's device; stages between the first and the last have no data."""
    from megatron.pretrain.initialize import this_device

    names = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    batch = next(data_iterator) if data_iterator is not None else {}
    return {name: batch[name].to(this_device(), non_blocking=True) if name in batch else None for name in names}


def loss_func(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(sum of the losses of unmasked tokens, number of those tokens, what the log reports)."""
    mask = loss_mask.reshape(-1).float()
    total, num_tokens = (losses.reshape(-1).float() * mask).sum(), mask.sum()
    report = total.new_tensor([0.0, 0.0])
    report[0], report[1] = total.detach(), num_tokens
    return total, num_tokens, {"lm loss": report}


def forward_step(data_iterator: Iterator | None, model: nn.Module) -> tuple[Tensor, Callable]:
    """One microbatch through one stage: (output, loss function for the last stage)."""
    batch = get_batch(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def main(argv: Sequence[str]) -> None:
    config = parse(argv)
    check(config, world_size(os.environ))

    # Told once, in the README, and not by every rank of every run: optional packages that are missing, core's old calls.
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).* not installed")
    warnings.filterwarnings("ignore", category=FutureWarning, module="megatron.core")

    from megatron.pretrain.training import pretrain

    pretrain(config, model_provider=model_provider, datasets_provider=datasets_provider, forward_step=forward_step)


# Core's checkpoint writer starts processes that import this file again.
if __name__ == "__main__":
    run_rank(lambda: main(sys.argv[1:]), os.environ)
