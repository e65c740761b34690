"""Runs of the training program itself on forked ranks, with their losses, gradients and weights recorded."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))
import pretrain_gpt  # noqa: E402

SEQ, VOCAB = 16, 60


class CountingTokens(torch.utils.data.Dataset):
    """Samples as GPTDataset makes them: tokens that count up from a random one, so that there is something to learn; some masked."""

    def __init__(self, size):
        generator = torch.Generator().manual_seed(5)
        self.tokens = (torch.randint(VOCAB, (size, 1), generator=generator) + torch.arange(SEQ + 1)) % VOCAB
        self.mask = (torch.rand(size, SEQ, generator=generator) < 0.9).float()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {
            "tokens": self.tokens[index, :-1],
            "labels": self.tokens[index, 1:],
            "loss_mask": self.mask[index],
            "position_ids": torch.arange(SEQ),
        }


def datasets_provider(config, num_samples, needs_data):
    return [CountingTokens(size) if needs_data() else None for size in num_samples]


def flags(**changes):
    """A command line of a tiny GPT with dropout on; `changes` are flags, None takes one out, True sets a switch."""
    settings = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "seq_length": SEQ, "max_position_embeddings": SEQ,
        "micro_batch_size": 2, "train_iters": 3, "lr": 1e-2, "mock_data": True, "tokenizer_type": "NullTokenizer",
        "vocab_size": VOCAB, "make_vocab_size_divisible_by": 8, "log_interval": 1, "eval_iters": 0,
        "untie_embeddings_and_output_weights": True, "clip_grad": 0.0,
    } | changes  # fmt: skip
    argv = []
    for name, value in settings.items():
        if value is not None:
            argv += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return argv


def global_names(pipeline):
    """{name in the whole model: parameter} of this rank."""
    names = {}
    for model in pipeline.models:
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(model.decoder.layers[int(parts[2])].layer_number)
            names[".".join(parts)] = parameter
    return names


def train(changes_of_runs):
    """One after another, the runs with these flags on the same ranks: [(losses, gradients of each iteration, weights)]."""
    from megatron.pipeline_parallel.planning.op import Placement
    from megatron.pretrain.flags import parse
    from megatron.pretrain.initialize import process_groups
    from megatron.pretrain.training import Trainer

    configs = [parse(flags(**changes)) for changes in changes_of_runs]
    placement = Placement.loop(configs[0].pipeline.pipeline_model_parallel_size)
    with process_groups(configs[0], placement):
        return [
            record(
                Trainer(config, placement, pretrain_gpt.model_provider, datasets_provider, pretrain_gpt.forward_step)
            )
            for config in configs
        ]


def record(trainer):
    """Train to the end; gradients are those that the optimizer is given."""
    losses, gradients = [], []
    finish, write = trainer.pipeline.finish_gradients, trainer.log.iteration
    names = global_names(trainer.pipeline)

    def finish_and_record():
        finish()
        gradients.append({name: parameter.main_grad.clone() for name, parameter in names.items()})

    def write_and_record(iteration, **figures):
        losses.append((figures["loss"], figures["grad_norm"]))
        write(iteration, **figures)

    trainer.pipeline.finish_gradients, trainer.log.iteration = finish_and_record, write_and_record
    computed = trainer.pipeline.weight_grads.num_computed
    trainer.train()
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": {name: parameter.detach().clone() for name, parameter in names.items()},
        "computed": trainer.pipeline.weight_grads.num_computed - computed,
        "waiting": trainer.pipeline.weight_grads.num_waiting(),
    }
