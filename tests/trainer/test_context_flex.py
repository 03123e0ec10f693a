"""FlexAttention over context ranks: block masks and score modifications of the whole sequence; what is refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_parallel.schemes.context import redirect
from tests.support.failures import RankError
from tests.support.models import VOCAB, LanguageModel, OptimizerOptions
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.support.training import GlobalBatches
from tests.trainer.common import make_trainer, seed
from tests.trainer.context_models import Block

METHODS = ("ring", "allgather", "ulysses")


def window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Causal, of the last four tokens; of the last two for odd heads."""
    return (q_idx >= kv_idx) & (q_idx - kv_idx < torch.where(h % 2 == 1, 2, 4))


def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - (q_idx - kv_idx).abs() * 0.25 * (h + 1)


class FlexBlock(Block):
    """Queries in four heads, keys in two."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.kv = how, nn.Linear(32, 32)
        self.held: BlockMask | None = None

    def forward(self, x: Tensor, block_mask: BlockMask | None = None) -> Tensor:
        q = self.out(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        if self.how == "inside":
            block_mask = create_block_mask(window, None, 4, x.size(1), x.size(1), device=x.device)
        if self.how == "held":
            block_mask = self.held
        score_mod = None if self.how == "mask" else alibi
        call = flex.flex_attention if self.how == "by module" else flex_attention
        out = call(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
        return x + out.transpose(1, 2).flatten(2)


class FlexStack(LanguageModel):
    def __init__(self, *, how: str = "both", trains_anywhere: bool = True, bare: bool = False) -> None:
        super().__init__(OptimizerOptions(name="sgd"))
        self.vocab, self.how, self.trains_anywhere, self.bare = VOCAB, how, trains_anywhere, bare
        self.embed, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.layers = nn.ModuleList(FlexBlock(how) for _ in range(2))

    def logits(self, x: Tensor) -> Tensor:
        mask = create_block_mask(window, None, 4, x.size(1), x.size(1), device=x.device)
        hidden = self.embed(x)
        for layer in self.layers:
            layer.held = mask
            hidden = layer(hidden) if self.how in ("held", "score", "inside") else layer(hidden, mask)
        return self.head(hidden)

    def loss(self, batch: Any) -> Tensor:
        if not self.trains_anywhere:
            return super().loss(batch)
        # torch refuses gradients on hosts, for want of a kernel; the plain math beneath has them.
        with patch.object(flex, "_validate_device"):
            return super().loss(batch)


@pytest.mark.parametrize("method", METHODS)
def test_mask_and_score(pool: WorkerPool, method: str) -> None:
    strategy: Spec = ("ContextParallel", {"method": method})
    assert_same_training(pool, FlexStack, strategy, world=2, seq=11, timeout=300)


@pytest.mark.parametrize("how", ["mask", "score", "held", "by module"])
def test_ways_to_call_it(pool: WorkerPool, how: str) -> None:
    strategy: Spec = ("ContextParallel", {})
    assert_same_training(pool, FlexStack, strategy, world=2, seq=10, model_kwargs={"how": how}, timeout=300)


def evaluate(strategy: Spec | None) -> float:
    """With torch's own refusal of gradients: without them a host computes. The names are put back."""
    seed()
    module = FlexStack(trains_anywhere=False)
    before = flex_attention, flex.flex_attention
    trainer = make_trainer(strategy, use_distributed_sampler=False, limit_val_batches=2)
    data = GlobalBatches(module, count=8, batch=4, seq=11)
    data.val_dataloader = data.train_dataloader  # type: ignore[method-assign]
    trainer.validate(module, datamodule=data, verbose=False)
    assert before == (flex_attention, flex.flex_attention)
    return float(trainer.callback_metrics["val_loss"])


def test_validation(pool: WorkerPool) -> None:
    [expected] = pool.run_once(evaluate, None, world=1)
    for found in pool.run(evaluate, ("ContextParallel", {}), world=4):
        assert found == pytest.approx(expected, rel=1e-5)


def refuse(options: dict[str, Any]) -> None:
    seed()
    module = FlexStack(**options)
    trainer = make_trainer(("ContextParallel", {}), use_distributed_sampler=False)
    trainer.fit(module, datamodule=GlobalBatches(module, count=8, batch=4, seq=10))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"how": "inside"}, r"PlanError: layers.0.*a block mask for .* Inside a block a mask cannot be built"),
        ({"trains_anywhere": False}, r"PlanError: layers.0.*torch refuses flex_attention.*backward on CPU.*attn_mask"),
    ],
    ids=str,
)
def test_what_is_refused(pool: WorkerPool, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RankError, match=said) as error:
        pool.run(refuse, options, world=2, timeout=300)
    assert len(error.value.failures) == 2


def of_own_rows(rows: Any, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    """What is wrong: this rank's queries and keys are taken for the first ones."""
    return original(*args, **kwargs)


def refuse_unseen() -> None:
    with patch.object(redirect, "flex_rows", of_own_rows):
        refuse({"how": "score"})


def test_a_block_is_refused_whose_flex_attention_is_not_exchanged(pool: WorkerPool) -> None:
    with pytest.raises(RankError, match=r"PlanError: layers.0 \(FlexBlock\) gives other values"):
        pool.run(refuse_unseen, world=2, timeout=300)
