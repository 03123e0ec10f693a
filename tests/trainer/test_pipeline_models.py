"""Models as people write them, in a pipeline: in-place code, checkpointing, state; and what a stage cannot know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import PlanError
from tests.support.failures import RankError
from tests.support.models import VOCAB, LanguageModel, OptimizerOptions
from tests.support.parity import assert_same_training
from tests.support.pool import WorkerPool
from tests.support.specs import Spec
from tests.trainer.test_bad_input import assert_refused, fit

DIM = 16
PP: Spec = ("PipelineParallel", {"microbatches": 4})
WHOLE: Spec = ("PipelineParallel", {"schedule": "GPipe", "microbatches": 1})
ZBV: Spec = ("PipelineParallel", {"schedule": "ZBVZeroBubble", "microbatches": 4})


def on_fsdp(spec: Any) -> Spec:
    return ("HybridParallel", {"fsdp": 2, "pp": (spec[0], {**spec[1], "size": 2})})


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.aux: Any = 0.0

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.linear(x))


class InPlace(Mix):
    """Changes its input, which the stage before has sent."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.linear(torch.ones_like(x)).tanh()
        return x


class WithFirst(Mix):
    def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + first


@dataclass
class State:
    hidden: Tensor
    steps: int = 0


class OnState(Mix):
    def forward(self, state: State) -> State:  # type: ignore[override]
        return State(super().forward(state.hidden), state.steps + 1)


class KeepsAside(Mix):
    """An auxiliary loss that the step finds on the block."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        self.aux = out.square().mean()
        return out


class Routes(KeepsAside):
    """So does this, and what it computes depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[..., 0] > 0).nonzero(as_tuple=True)
        return x.index_put(chosen, super().forward(x[chosen]))


class Stack(LanguageModel):
    block: type[nn.Module] = Mix

    def __init__(self, optimizer: OptimizerOptions | str = "adamw") -> None:
        super().__init__(optimizer)
        self.vocab = VOCAB
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.noted: list[Tensor] = []

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]


class StackInPlace(Stack):
    block = InPlace


class StackOfStates(Stack):
    block = OnState

    def forward(self, ids: Tensor) -> Tensor:
        state = State(self.embed(ids))
        for block in self.blocks:
            state = block(state)
        return self.head(state.hidden)  # type: ignore[no-any-return]


class Filled(Stack):
    """Every block gets a tensor that was made of zeros and then filled."""

    block = WithFirst

    def forward(self, ids: Tensor) -> Tensor:
        first = torch.zeros(*ids.shape, DIM)
        first[:, 1:] = self.embed(ids[:, 1:])
        first[:, 0] += self.embed.weight.mean(0)
        x = first.clone()
        for block in self.blocks:
            x = block(x, first)
        return self.head(x)  # type: ignore[no-any-return]


class Checkpointed(Stack):
    reentrant = False

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


class Reentrant(Checkpointed):
    reentrant = True


class Spanning(Stack):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(ids))
        x = checkpoint(lambda x: self.blocks[2](self.blocks[1](x)), x, use_reentrant=False)
        return self.head(self.blocks[3](x))  # type: ignore[no-any-return]


class ChangesItsBatch(Stack):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        x.add_(1).remainder_(VOCAB)
        batch.clear()
        return super().loss((x, y))


class Centred(Stack):
    """Buffers that the step changes, before and after the blocks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(VOCAB))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += ids.sum()  # type: ignore[operator]
        logits = super().forward(ids)
        with torch.no_grad():
            self.centre.lerp_(logits.mean((0, 1)), 0.1)  # type: ignore[operator]
        return logits


class AuxiliaryLoss(Stack):
    block = KeepsAside

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) + sum(block.aux for block in self.blocks)  # type: ignore[misc]


class Routed(AuxiliaryLoss):
    block = Routes


class Hooked(Stack):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, out: self.noted.append(out.square().mean()))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(batch) + torch.stack(self.noted).mean()
        self.noted.clear()
        return loss


class FailsAtTheEnd(Stack):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx)
        raise KeyError("a mistake after the model")


class FailsInABlock(Stack):
    class Fails(Mix):
        def forward(self, x: Tensor) -> Tensor:
            if type(x) is Tensor:
                raise KeyError("a mistake in a block")
            return super().forward(x)  # type: ignore[no-any-return]

    block = Fails


@pytest.mark.parametrize(
    ("model", "strategy", "world"),
    [
        (StackInPlace, PP, 2),
        (StackInPlace, ZBV, 2),
        (StackOfStates, PP, 2),
        (Filled, PP, 2),
        (Filled, ZBV, 2),
        (Filled, on_fsdp(PP), 4),
        (Checkpointed, PP, 2),
        (Checkpointed, ZBV, 2),
        (Checkpointed, on_fsdp(PP), 4),
        (ChangesItsBatch, PP, 2),
        (Centred, WHOLE, 2),
        (Stack, ZBV, 2),  # whose blocks return what their own graph has saved
        (Stack, on_fsdp(ZBV), 4),  # and whose root runs twice: self(batch)
    ],
)
def test_trains_as_on_one_device(pool: WorkerPool, model: Any, strategy: Spec, world: int) -> None:
    assert_same_training(pool, model, strategy, world=world)


@pytest.mark.parametrize(
    ("model", "shown"),
    [
        (AuxiliaryLoss, "The loss is computed from what blocks.0 gives on another pipeline stage"),
        (Routed, "The loss is computed from what blocks.0 gives on another pipeline stage"),
        (Hooked, "The loss is computed from what blocks.0 gives on another pipeline stage"),
        (Reentrant, "Use use_reentrant=False"),
    ],
)
def test_what_a_stage_cannot_have(pool: WorkerPool, model: Any, shown: str) -> None:
    assert_refused(pool, PlanError, [shown], fit, model, PP)


def test_a_checkpoint_over_two_stages(pool: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fit, Spanning, PP, world=2)
    assert len(caught.value.exceptions) == 2
    assert any("activation checkpointing spans" in str(error) for error in caught.value.exceptions.values())


@pytest.mark.parametrize("strategy", [PP, ZBV])
@pytest.mark.parametrize(
    ("model", "shown"), [(FailsAtTheEnd, "a mistake after the model"), (FailsInABlock, "a mistake in a block")]
)
def test_a_mistake_is_told_on_every_rank(pool: WorkerPool, model: Any, shown: str, strategy: Spec) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(fit, model, strategy, world=2)
    errors = caught.value.exceptions
    assert len(errors) == 2
    assert all(shown in str(error) for error in errors.values())
    assert any(isinstance(error, KeyError) for error in errors.values())
