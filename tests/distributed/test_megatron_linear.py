"""Split Column/RowParallelLinear against megatron-core's own, bit for bit, with tensor and sequence parallelism."""

import pytest
import torch
from forked_ranks import run_ranks

SEQ, BATCH, WIDTH = 4, 2, 8


def layers(sequence_parallel, bias):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(3)
    config = TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, use_cpu_initialization=True,
        tensor_model_parallel_size=torch.distributed.get_world_size(), sequence_parallel=sequence_parallel,
    )  # fmt: skip
    options = {"config": config, "init_method": torch.nn.init.normal_, "bias": bias, "skip_bias_add": False}
    column = ColumnParallelLinear(WIDTH, 2 * WIDTH, gather_output=False, **options)
    return torch.nn.ModuleList([column, RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True, **options)])


def run(sequence_parallel, bias):
    from megatron.core import parallel_state

    from megatron.pipeline_parallel.runtime.megatron_linear import split_parallel_linears
    from megatron.pipeline_parallel.runtime.weight_grad import WeightGradStore

    size = torch.distributed.get_world_size()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size, create_gloo_process_groups=False)
    plain, split, store = layers(sequence_parallel, bias), layers(sequence_parallel, bias), WeightGradStore()
    assert split_parallel_linears(split, store) == 2
    with pytest.raises(ValueError, match="split already"):
        split_parallel_linears(split, store)
    local = SEQ // size if sequence_parallel else SEQ
    results = []
    for model in (plain, split):
        total = torch.randn(SEQ, BATCH, WIDTH, generator=torch.Generator().manual_seed(4))
        start = torch.distributed.get_rank() * local if sequence_parallel else 0
        sample = total[start : start + local].clone().requires_grad_()
        output, _ = model[1](model[0](sample)[0])
        with store.collect("key"):
            output.square().sum().backward()
        if model is split:
            assert store.num_waiting() == 2 and all(layer.weight.grad is None for layer in split)
        store.compute("key")
        results.append([output, sample.grad, *(parameter.grad for parameter in model.parameters())])
    return [torch.equal(one, other) for one, other in zip(*results, strict=True)]


@pytest.mark.parametrize("ranks, sequence_parallel", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_equal_cores(ranks, sequence_parallel, bias, tmp_path):
    for equal in run_ranks(run, ranks, tmp_path, sequence_parallel, bias):
        assert equal == [True] * len(equal) and len(equal) == (6 if bias else 4)
