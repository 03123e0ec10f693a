"""SIGTERM on rank 0 ends training on every rank, told without waiting for one another."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor


class SigtermFlag:
    """Takes the place of Lightning's broadcast before each batch, which every rank waits for.

    That would end a step on all ranks together, so that a pipeline could not fill the bubble of one step with the next,
    and stop the host until an accelerator has caught up. Here a flag is sent before one batch and read before the next:
    training goes on for one batch more.

    Args:
        trainer: Whose signal handler saw the signal.
        device: Of this rank.
    """

    def __init__(self, trainer: pl.Trainer, device: torch.device) -> None:
        self._trainer, self._device = trainer, device
        self._sent: tuple[Tensor, dist.Work] | None = None

    def __call__(self) -> None:
        """Before a batch, on every rank.

        Raises:
            SIGTERMException: Rank 0 had been asked to end, one batch ago.
        """
        if (flag := self.wait()) is not None and flag.item():
            dist.barrier()
            raise SIGTERMException
        flag = torch.tensor([int(self._trainer.received_sigterm)], device=self._device)
        self._sent = flag, dist.broadcast(flag, src=0, async_op=True)

    def wait(self) -> Tensor | None:
        """For the flag that was sent last, if there is one."""
        if self._sent is None:
            return None
        (flag, work), self._sent = self._sent, None
        work.wait()
        return flag
