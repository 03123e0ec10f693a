"""A stage as torch's schedules drive it, whose microbatches are calls of the user's step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel._torch import (
    PipelineStageBase,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from lightning_parallel.schemes.pipeline.stages import Slot, StagedModule
from lightning_parallel.schemes.pipeline.wire import Wire

Works = list[dist.P2POp]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch.

    Attributes:
        call: The user's step on it.
        signature: Equal for microbatches that take the same shapes through the model.
        seed: Of its random numbers, the same on every stage.
    """

    call: Callable[[], Any]
    signature: Any
    seed: int


class MicrobatchStage(PipelineStageBase):
    """One stage on this rank.

    It answers what a schedule of ``torch.distributed.pipelining`` asks of a stage, in terms of a step. A microbatch
    that is ``None`` (the batch had fewer samples) computes and sends nothing.

    Args:
        staged: The module.
        index: Of the stage.
        device: Of this rank.
        group: The ranks of one pipeline.
        wire: How values travel.
        run_as_root: Runs a call as FSDP's root forward.
        seed: Called with a microbatch's seed before the step, and with another one before the first own block.
        use_output: Takes what the step returned on the last stage, and gives the loss to run backward from.
        observe: Called as ``observe(stage, kind, microbatch)`` around each computation: a context manager.
        fail: Called with the stage and an error. See [Note: to the end].
    """

    def __init__(
        self,
        staged: StagedModule,
        index: int,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        wire: Wire,
        run_as_root: Callable[[Callable[[], Any]], Any],
        seed: Callable[[int], None],
        use_output: Callable[[int, Any], Tensor],
        observe: Callable[[int, str, int], Any],
        fail: Callable[[int, Exception], None],
    ) -> None:
        super().__init__(nn.Identity(), index, staged.split.num_stages, device, group)
        self._staged, self._wire = staged, wire
        self._run_as_root, self._seed, self._use_output, self._observe = run_as_root, seed, use_output, observe
        self._fail, self._has_failed = fail, False
        self._microbatches: Sequence[Microbatch | None] = []
        self._receives: list[list[Slot]] = []
        self._sends: list[list[Slot]] = []
        self._buffers: dict[int, list[Tensor]] = {}
        self._grads: dict[int, list[Tensor | None]] = {}
        self.bytes_sent = 0

    def set_microbatches(
        self, microbatches: Sequence[Microbatch | None], receives: list[list[Slot]], sends: list[list[Slot]]
    ) -> None:
        """What the next step of the schedule works on: slots from the stage before and to the stage after."""
        self._microbatches, self._receives, self._sends = microbatches, receives, sends
        self._has_failed = False
        self.bytes_sent = 0

    # --- what a schedule asks once --------------------------------------------------------------------------------

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> Any:
        self.chunks = num_microbatches
        self.args_recv_info, self.act_send_info = {0: ()}, {}
        return None

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> Works:
        # A collective of the group came first, which sets up a backend's connections; torch's would send to itself
        # where a V-shaped schedule has neighbours on one rank.
        return []

    def clear_runtime_states(self) -> None:
        """Nothing is left of an earlier step, even one that failed."""
        self.fwd_cache.clear()
        self.bwd_cache.clear()
        self.output_chunks.clear()
        self.backward_state.clear()
        self._buffers.clear()
        self._grads.clear()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Left to the step, which reduces the gradients of all its stages."""

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Microbatches bring their weights."""

    # --- forward --------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Works:
        """Receive the slots."""
        slots = self._receives[fwd_chunk_id]
        self._buffers[fwd_chunk_id] = buffers = [
            torch.empty(self._wire.shape(slot, slots), dtype=slot.dtype, device=self.device) for slot in slots
        ]
        return [self._op(dist.irecv, buffer, self.stage_index - 1) for buffer in buffers]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Works:
        """Send the outputs."""
        if self.is_last or self._microbatches[fwd_chunk_id] is None:
            return []
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        return [self._send(output.detach(), self.stage_index + 1) for output in outputs]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The stage before is on this rank, whose graph may need what this one changes in place."""
        self._buffers[mb_index] = [output.detach().clone() for output in prev_stage_outputs]

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the step up to the boundary, or to its end: the outputs to send, or the loss."""
        microbatch = self._microbatches[fwd_chunk_id]
        if microbatch is None:
            self.fwd_cache[fwd_chunk_id] = ((), [])
            return torch.zeros(()) if self.is_last else ()
        slots = self._receives[fwd_chunk_id]
        inputs = self._buffers.pop(fwd_chunk_id, [])
        for slot, value in zip(slots, inputs, strict=True):
            value.requires_grad_(slot.requires_grad and self.has_backward)
        sends = None if self.is_last else self._sends[fwd_chunk_id]

        def job() -> Any:
            self._seed(microbatch.seed)
            arrived = [_alias(value) if value.requires_grad else value for value in inputs]
            received = {s.path: self._wire.unpack(v, s, slots) for s, v in zip(slots, arrived, strict=True)}
            result = self._staged.run(
                self.stage_index,
                microbatch.call,
                microbatch.signature,
                received=received,
                sends=sends,
                on_enter=lambda: self._seed(microbatch.seed + self.stage_index),
            )
            if sends is None:
                return self._use_output(fwd_chunk_id, result)
            return [self._wire.pack(value, slot, sends) for slot, value in zip(sends, result, strict=True)]

        if not self._has_failed:
            with self._observe(self.stage_index, "F", fwd_chunk_id), self._to_the_end():
                output = self._run_as_root(job)
        if self._has_failed:
            output = torch.zeros(()) if sends is None else [self._zeros(slot, sends) for slot in sends]
        self.fwd_cache[fwd_chunk_id] = ((output,) if self.is_last else tuple(output), inputs)
        return output

    # --- backward -------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Works:
        """Receive the gradients of the outputs that need one."""
        if self.is_last or not self.has_backward or self._microbatches[bwd_chunk_id] is None:
            return []
        slots = self._sends[bwd_chunk_id]
        grads = [
            torch.empty(self._wire.shape(slot, slots), dtype=slot.dtype, device=self.device)
            if slot.requires_grad
            else None
            for slot in slots
        ]
        self._grads[bwd_chunk_id] = grads
        return [self._op(dist.irecv, grad, self.stage_index + 1) for grad in grads if grad is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Works:
        """Send the gradients of the inputs."""
        if self.is_first or not self.has_backward or self._microbatches[bwd_chunk_id] is None:
            return []
        grads = self.bwd_cache.pop(bwd_chunk_id)
        return [self._send(grad, self.stage_index - 1) for grad in grads if grad is not None]

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The stage before is on this rank."""
        return self.bwd_cache.pop(mb_index, ())

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The stage after is on this rank."""
        self._grads[mb_index] = list(next_stage_bwd_outputs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward, whole or for the inputs only."""
        if not self.has_backward:
            return
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        if self._microbatches[bwd_chunk_id] is None:
            self.bwd_cache[bwd_chunk_id] = ()
            return
        grads = [torch.ones_like(outputs[0])] if self.is_last else self._grads.pop(bwd_chunk_id)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad and g is not None]
        kind = "B" if full_backward else "I"
        with self._running_backward(kind, bwd_chunk_id):
            if full_backward:
                stage_backward([o for o, _ in pairs], [g for _, g in pairs], [])
            elif not (needing := [value for value in inputs if value.requires_grad]):  # all of it is the weights' part
                self.backward_state[bwd_chunk_id] = (pairs,)
            else:
                # It detaches the outputs in place, which a view cannot be, nor what the graph has saved.
                pairs = [(_alias(output), gradient) for output, gradient in pairs]
                _, groups = stage_backward_input(
                    [o for o, _ in pairs], [g for _, g in pairs], needing, iter(self._weights())
                )
                self.backward_state[bwd_chunk_id] = (groups,)
        self.bwd_cache[bwd_chunk_id] = tuple(
            (torch.zeros_like(value) if value.grad is None else value.grad) if slot.requires_grad else None
            for slot, value in zip(self._receives[bwd_chunk_id], inputs, strict=True)
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run what ``backward_one_chunk`` left for the weights."""
        if not self.has_backward or self._microbatches[bwd_chunk_id] is None:
            return
        if self._has_failed:
            return
        (left,) = self.backward_state.pop(bwd_chunk_id)
        with self._running_backward("W", bwd_chunk_id):
            if left and isinstance(left[0], tuple):
                stage_backward([o for o, _ in left], [g for _, g in left], [])
            else:
                stage_backward_weight(iter(self._weights()), left)

    def _weights(self) -> list[nn.Parameter]:
        return [weight for weight in self._staged.parameters(self.stage_index) if weight.requires_grad]

    @contextmanager
    def _running_backward(self, kind: str, microbatch: int) -> Iterator[None]:
        with (
            self._observe(self.stage_index, kind, microbatch),
            self._to_the_end(),
            self._staged.running_backward(self.stage_index),
        ):
            yield

    @contextmanager
    def _to_the_end(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._has_failed = True
            self._fail(self.stage_index, error)

    def _zeros(self, slot: Slot, slots: list[Slot]) -> Tensor:
        return torch.zeros(self._wire.shape(slot, slots), dtype=slot.dtype, device=self.device)

    # --- the wire -------------------------------------------------------------------------------------------------

    def _send(self, value: Tensor, stage: int) -> dist.P2POp:
        self.bytes_sent += value.numel() * value.element_size()
        return self._op(dist.isend, value.contiguous(), stage)

    def _op(self, kind: Any, value: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, value, group=self.group, group_peer=self.stage_index_to_group_rank[stage])


def _alias(value: Tensor) -> Tensor:
    alias: Tensor = _Alias.apply(value)  # type: ignore[no-untyped-call]
    return alias


class _Alias(torch.autograd.Function):
    """The same values as the result of a function: a block may change it in place, which it may not do to a leaf."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
