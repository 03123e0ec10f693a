"""Dropout over a mesh: apart where tensors are split, alike where they are replicated, the same again on recompute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel.mesh import ParallelMesh, ResolvedSizes
from lightning_parallel.plan import ParallelPlan
from lightning_parallel.recipe import Recipe, parallelize
from lightning_parallel.step import EagerStep
from tests.support.models import NANOGPT_PLAN, HuggingFaceLM, NanoGPT
from tests.support.pool import WorkerPool
from tests.support.training import Training, train

RATE, DIM, SEQ = 0.25, 64, 32


class Layer(nn.Module):
    """Dropout inside the layer, where features are split, and after it, where the sequence may be."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inner, self.outer = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.down(self.inner(self.up(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Masks(LightningModule):
    """Keeps the masks that dropout drew, as the modules saw them (a rank's own part, or the whole)."""

    def __init__(self, *, keep: bool = True) -> None:
        super().__init__()
        self.embedding_dropout = nn.Dropout(RATE)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.seen: dict[str, list[Tensor]] = {}
        for name, module in self.named_modules():
            if keep and isinstance(module, nn.Dropout):
                self.seen[name] = []
                module.register_forward_hook(lambda _, args, out, name=name: self._keep(name, args[0], out))

    def _keep(self, name: str, x: Tensor, out: Tensor) -> None:
        zeros = out.to_local() if hasattr(out, "to_local") else out
        whole = x.to_local() if hasattr(x, "to_local") else x
        self.seen[name].append((zeros.detach() != 0) | (whole.detach() == 0))

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        x = self.embedding_dropout(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return x


PLAN = {
    "layers.*": "block",
    "layers.*.layer.up": "colwise",
    "layers.*.layer.down": "rowwise",
}


def set_up(module: nn.Module, sizes: Mapping[str, int], plan: Mapping[str, str], **options: Any) -> EagerStep:
    """Parallelise ``module`` and seed the ranks."""
    dist.init_process_group("gloo")
    mesh = ParallelMesh("cpu", ResolvedSizes(**sizes))
    recipe = Recipe(plan=ParallelPlan(plan), **options)
    result = parallelize(module, mesh, recipe, device=torch.device("cpu"), seed=0)
    # As the strategy does it: peers on the tp axis alike, data ranks apart.
    torch.manual_seed(100 + mesh.data_rank)
    return EagerStep(module, result)


def draw(local: bool, sequence_parallel: bool, steps: int) -> dict[str, Any]:
    """The masks of the last of some steps, what came out, and the generator's state."""
    torch.manual_seed(0)
    module = Masks()
    plan = {**PLAN, "layers.*.layer": "local"} if local else PLAN
    step = set_up(module, {"ddp": 2, "tp": 2}, plan, sequence_parallel=sequence_parallel)
    x = torch.ones(4, SEQ, DIM)
    for _ in range(steps):
        for masks in module.seen.values():
            masks.clear()
        out = step.run("training", lambda: module(x), (), {}, keep_gathered=True)
        with step.backward():
            out.sum().backward()
    masks = {name: torch.cat(seen).numpy() for name, seen in module.seen.items()}
    return {"masks": masks, "out": out.detach().numpy(), "state": torch.get_rng_state().numpy()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("local", [True, False], ids=["local", "global"])
def test_masks_differ_over_shards_and_agree_on_replicas(pool: WorkerPool, local: bool, sequence_parallel: bool) -> None:
    ranks = pool.run(draw, local, sequence_parallel, 3, world=4)
    peers, others = (ranks[:2], ranks[2:]), (ranks[0], ranks[2])
    for name in ranks[0]["masks"]:
        for first, second in peers:
            are_split = "inner" in name or ("outer" in name and sequence_parallel)
            assert np.array_equal(first["masks"][name], second["masks"][name]) != are_split, name
        assert not np.array_equal(others[0]["masks"][name], others[1]["masks"][name]), f"{name} over data ranks"
        for rank in ranks:
            mask = rank["masks"][name]
            # Binomial: six standard deviations.
            margin = 6 * (RATE * (1 - RATE) / mask.size) ** 0.5
            assert abs(mask.mean() - (1 - RATE)) < margin, name
    for first, second in peers:
        assert np.array_equal(first["out"], second["out"])
        assert np.array_equal(first["state"], second["state"]), "the common stream went apart"
    names = list(ranks[0]["masks"])
    assert not np.array_equal(ranks[0]["masks"][names[1]], ranks[0]["masks"][names[3]]), "layers repeat a mask"


def recompute(local: bool) -> list[dict[str, Any]]:
    """Gradients and masks with and without recomputation, from one state."""
    torch.manual_seed(0)
    module = Masks()
    plan = {**PLAN, "layers.*.layer": "local"} if local else PLAN
    step = set_up(module, {"tp": 2}, plan)
    state, results = torch.get_rng_state(), []
    x = torch.randn(4, SEQ, DIM, generator=torch.Generator().manual_seed(1))
    for again in (False, True):
        torch.set_rng_state(state)
        module.zero_grad()
        for masks in module.seen.values():
            masks.clear()
        out = step.run("training", lambda again=again: module(x, again), (), {}, keep_gathered=True)
        with step.backward():
            out.pow(2).sum().backward()
        gradients = {name: p.grad.full_tensor().numpy() for name, p in module.named_parameters()}
        masks = {name: [mask.numpy() for mask in seen] for name, seen in module.seen.items()}
        results.append({"gradients": gradients, "masks": masks, "state": torch.get_rng_state().numpy()})
    return results


@pytest.mark.parametrize("local", [True, False], ids=["local", "global"])
def test_recomputation_draws_the_same_masks(pool: WorkerPool, local: bool) -> None:
    for plain, again in pool.run(recompute, local, world=2):
        for name, gradient in plain["gradients"].items():
            np.testing.assert_array_equal(gradient, again["gradients"][name], err_msg=name)
        for name, (mask, *rest) in again["masks"].items():
            # What is last in a layer needs no second run to its end: its gradient shows that it was the same.
            assert len(rest) == 1 or "inner" not in name, "each layer ran once more"
            assert all(np.array_equal(mask, other) for other in rest), name
        assert np.array_equal(plain["state"], again["state"])


def attention(dropout: float) -> dict[str, Any]:
    """Attention on heads that are split (dim 1): the mask of each rank's own heads shows in its outputs."""
    torch.manual_seed(0)
    module = NanoGPT(heads=2, layers=1, dropout=0.0)
    step = set_up(module, {"tp": 2}, NANOGPT_PLAN)
    module.model.h[0].attn.dropout = dropout
    with torch.no_grad():  # one query's output is one value: the sum of what dropout left of it
        module.model.h[0].attn.c_attn.weight.to_local().zero_()
        module.model.h[0].attn.c_attn.bias.to_local().fill_(1.0)
    seen: list[Tensor] = []
    original = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        seen.append(out.to_local())
        return out

    F.scaled_dot_product_attention = spy
    try:
        step.run("training", lambda: module.model(torch.zeros(64, 16, dtype=torch.long)), (), {}, keep_gathered=True)
    finally:
        F.scaled_dot_product_attention = original
    return {"heads": seen[0].detach().numpy(), "state": torch.get_rng_state().numpy()}


def test_attention_dropout_over_heads(pool: WorkerPool) -> None:
    first, second = pool.run(attention, 0.5, world=2)
    assert first["heads"].shape[1] == 1, "a head a rank"
    assert not np.array_equal(first["heads"], second["heads"])
    assert np.array_equal(first["state"], second["state"])
    for rank in (first, second):
        assert rank["heads"].mean() == pytest.approx(1.0, abs=0.05), "the expectation is that of one device"
        assert rank["heads"].std() > 0.1
    assert all(np.allclose(rank["heads"], 1.0) for rank in pool.run(attention, 0.0, world=2))


DROPOUTS: dict[str, Mapping[str, Any]] = {
    "GPTNeoX": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "Llama": {"attention_dropout": 0.1},
}


@pytest.mark.parametrize("model", ["packed", *DROPOUTS])
@pytest.mark.parametrize("mesh", [{"ddp": 2, "fsdp": 1, "tp": 2}, {"fsdp": 2, "tp": 2}], ids=str)
def test_replicas_stay_one_model(pool: WorkerPool, model: str, mesh: dict[str, int]) -> None:
    if model == "packed":
        ranks = _train(pool, NanoGPT, {"dropout": 0.1}, {**mesh, "plan": dict(NANOGPT_PLAN)})
    else:
        ranks = _train(pool, HuggingFaceLM, {"arch": model, **DROPOUTS[model]}, mesh)
    for rank in ranks[1:]:
        for name, weight in ranks[0].final.items():
            np.testing.assert_array_equal(weight, rank.final[name], err_msg=name)
        assert rank.losses == ranks[0].losses
    assert ranks[0].losses[-1] < ranks[0].losses[0]


def _train(pool: WorkerPool, model: Any, model_kwargs: Any, mesh: Mapping[str, Any]) -> Any:
    training = Training(
        model=model,
        model_kwargs=model_kwargs,
        strategy=("HybridParallel", mesh),
        steps=5,
        batch=8,
        seq=16,
        accumulate=1,
        clip_val=None,
        clip_algorithm="norm",
        precision="32-true",
        trainer_kwargs={},
    )
    return pool.run(train, training, world=4)
