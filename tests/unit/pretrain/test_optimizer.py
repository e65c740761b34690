"""AdamW, clipping and the learning rate schedule as megatron-core does them, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forked_ranks import run_ranks
from tiny_run import BATCH, TinyRun, tiny_config


def test_three_steps_equal_torch_adamw(tmp_path):
    (differences,) = run_ranks(_against_torch, 1, tmp_path)
    assert differences == 0


def _against_torch() -> int:
    run = TinyRun(tiny_config(clip_grad=0.0, weight_decay=0.1, adam_beta2=0.95))
    copies = {name: param.detach().clone().requires_grad_() for name, param in run.model.named_parameters()}
    decayed = [copy for copy in copies.values() if copy.dim() > 1]
    plain = [copy for copy in copies.values() if copy.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for iteration in range(3):
        run.backward(iteration)
        for name, param in run.model.named_parameters():
            copies[name].grad = param.main_grad.clone()
        for group in reference.param_groups:
            group["lr"] = run.optimizer.param_groups[0]["lr"]
        reference.step()
        run.optimizer.step()
        run.scheduler.step(increment=BATCH)
    return sum(not torch.equal(param, copies[name]) for name, param in run.model.named_parameters())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_one_global_norm_clips_all_ranks_alike(tmp_path, ranks, bf16):
    results = run_ranks(_clipped, ranks, tmp_path, bf16)
    # The embedding and the head's copy of it are one parameter: its gradient counts once in the norm.
    squares = sum(result["squares"] for result in results) - (results[-1]["shared"] if ranks > 1 else 0)
    for result in results:
        assert result["norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
        assert result["factor"] == pytest.approx(0.1 / result["norm"], rel=1e-4)


def _clipped(bf16: bool) -> dict[str, Any]:
    run = TinyRun(tiny_config(clip_grad=0.1, bf16=bf16))
    run.backward(0)
    before = {name: param.main_grad.clone() for name, param in run.model.named_parameters()}
    done, norm, _ = run.optimizer.step()
    assert done
    inner = run.optimizer.chained_optimizers[0].optimizer
    clipped = math.sqrt(
        sum(param.grad.square().sum().item() for group in inner.param_groups for param in group["params"])
    )
    squares = sum(gradient.square().sum().item() for gradient in before.values())
    shared = run.model.shared_embedding_or_output_weight()
    return {
        "norm": norm,
        "squares": squares,
        "factor": clipped / math.sqrt(squares),
        "shared": next((before[n].square().sum().item() for n, p in run.model.named_parameters() if p is shared), 0.0),
    }


def test_bf16_keeps_float32_main_parameters(tmp_path):
    (result,) = run_ranks(_main_parameters, 1, tmp_path)
    assert result == {"model": {torch.bfloat16}, "main": {torch.float32}, "rounded": True, "moved": True}


def _main_parameters() -> dict[str, Any]:
    run = TinyRun(tiny_config(bf16=True, lr=1e-5))  # below bf16's resolution for most weights
    params = list(run.model.parameters())
    before = [param.main_param.clone() for param in params]
    run.step(0), run.step(1)
    return {
        "model": {param.dtype for param in params},
        "main": {param.main_param.dtype for param in params},
        "rounded": all(torch.equal(param, param.main_param.bfloat16()) for param in params),
        "moved": all(not torch.equal(param.main_param, old) for param, old in zip(params, before, strict=True)),
    }


def test_the_schedule_counts_samples_as_megatron_does(tmp_path):
    (rates,) = run_ranks(_rates, 1, tmp_path)
    assert rates["linear"] == pytest.approx([0.0, 0.5, 1.0, 0.775, 0.55, 0.325, 0.1, 0.1])
    assert rates["constant"] == pytest.approx([0.0, 0.5] + [1.0] * 6)
    assert rates["fraction"] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert rates["cosine"][2:5] == pytest.approx([1.0, 0.1 + 0.9 * 0.5 * (math.cos(math.pi / 4) + 1), 0.55])
    assert rates["train_iters"][-1] == pytest.approx(0.0)


def _rates() -> dict[str, list[float]]:
    def rates(iterations: int, **settings: Any) -> list[float]:
        from megatron.pretrain.optimizer import build_scheduler

        scheduler = build_scheduler(tiny_config(**{"lr": 1.0, **settings}), run.optimizer)
        seen = []
        for _ in range(iterations):
            seen.append(run.optimizer.param_groups[0]["lr"])
            scheduler.step(increment=BATCH)
        return seen

    found = {}
    run = TinyRun(tiny_config(lr=1.0, min_lr=0.1))  # a group's max_lr and min_lr come from the optimizer's settings
    warmed = {"min_lr": 0.1, "lr_warmup_iters": 2, "lr_decay_iters": 6}
    for style in ("linear", "constant", "cosine"):
        found[style] = rates(8, lr_decay_style=style, **warmed)
    found["fraction"] = rates(4, lr_warmup_iters=0, lr_warmup_fraction=0.5, lr_decay_iters=6)
    run = TinyRun(tiny_config(lr=1.0))
    found["train_iters"] = rates(11)
    return found
