"""Tied embeddings under any placement: the head's copy of the word embedding and its share of the gradient."""

import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron.pipeline_parallel.planning.op import Placement


def embedding_ranks(placement: Placement):
    """What core's `initialize_model_parallel(get_embedding_ranks=...)` asks: of one pipeline's ranks, those with a copy."""

    def ranks(pipeline_ranks: list[int], *_: object) -> list[int]:
        first, last = placement.rank_of(0), placement.rank_of(placement.num_stages - 1)
        return [pipeline_ranks[rank] for rank in sorted({first, last})]

    return ranks


def add_tied_gradients(models: dict[int, nn.Module], placement: Placement) -> None:
    """Give both copies of a tied embedding the sum of their gradients, so that equal steps keep them equal.

    `models` are this rank's GPT stages by stage. Collective over the two ranks that hold the copies; where one rank
    holds both, they are summed in place.
    """
    first, last = 0, placement.num_stages - 1
    copies = [models[stage] for stage in sorted({first, last} & models.keys())]
    if first == last or not copies or not copies[0].share_embeddings_and_output_weights:
        return
    gradients = [model.shared_embedding_or_output_weight().main_grad for model in copies]
    if placement.is_local(first, last):
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])
    else:
        dist.all_reduce(gradients[0], group=parallel_state.get_embedding_group())
