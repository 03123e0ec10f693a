"""Folders and files with sharded modules: what is replaced, what is refused, and who else reads them."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint import (
    lay_out,
    load_model_state_dict,
    load_optimizer_state_dict,
    load_sharded,
    model_state_dict,
    optimizer_state_dict,
    read_file,
    save_sharded,
)
from lightning_parallel.checkpoint.layout import gather
from lightning_parallel.errors import ParallelConfigError
from tests.support.checkpoints import (
    META,
    Toy,
    assert_holds,
    assert_same,
    build,
    checkpoint_of,
    fill,
    make_mesh,
    make_optimizer,
    shard,
    step,
    trained,
    whole,
)
from tests.support.pool import WorkerPool


def overwrite(path: Path, world: int) -> None:
    axes = {"fsdp": world}
    module = build(axes)
    fill(module, f"world {world}")
    save_sharded(path, {"state_dict": model_state_dict(module, full=False)})


def test_a_folder_replaces_what_was_there(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    pool.run(overwrite, path, 4, world=4)
    pool.run(overwrite, path, 2, world=2)
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt"]
    other = tmp_path / "other.ckpt"
    path.rename(other)
    path.symlink_to(other)  # as ModelCheckpoint does for the last one
    before = {p.name: p.read_bytes() for p in other.iterdir()}
    pool.run(overwrite, path, 4, world=4)
    assert not path.is_symlink()
    assert {p.name: p.read_bytes() for p in other.iterdir()} == before
    file = tmp_path / "file.ckpt"
    file.write_text("")
    pool.run(overwrite, file, 2, world=2)
    expected = Toy()
    fill(expected, "world 2")
    assert_same(load_sharded(file, Toy())["state_dict"], dict(expected.state_dict()))
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def errors_on_every_rank(folder: Path) -> list[str]:
    module = build({"fsdp": 2})
    fill(module)
    save_sharded(folder / "good", {"state_dict": model_state_dict(module, full=False)})
    messages = []
    (folder / "other").mkdir(exist_ok=True)
    (folder / "other" / "notes.txt").write_text("mine")
    dist.barrier()
    for attempt in (
        lambda: save_sharded(folder / "other", {"state_dict": {}}),
        lambda: load_sharded(folder / "other", module),
        lambda: load_model_state_dict(module, {"new.weight": torch.zeros(3)}),
        lambda: load_model_state_dict(
            module, {**load_sharded(folder / "good", module)["state_dict"], "more": torch.zeros(1)}
        ),
        lambda: load_model_state_dict(module, {"unused": torch.zeros(6)}, strict=False),
    ):
        with pytest.raises((OSError, ValueError, RuntimeError)) as caught:
            attempt()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    missing = load_model_state_dict(module, {"unused": torch.ones(5), "more": torch.zeros(1)}, strict=False)
    assert missing.unexpected_keys == ["more"]
    assert "embedding.weight" in missing.missing_keys
    assert gather(module.unused).tolist() == [1.0] * 5
    return messages


def test_errors_are_torchs_and_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    found = pool.run(errors_on_every_rank, tmp_path, world=2)
    assert found[0] == found[1]
    other_folder, no_shards, missing, unexpected, size = found[0]
    assert other_folder.startswith("FileExistsError")
    assert "notes.txt" in other_folder
    assert "meta.pt" in no_shards
    assert 'Missing key(s) in state_dict: "unused"' in missing
    assert 'Unexpected key(s) in state_dict: "new.weight"' in missing
    assert 'Unexpected key(s) in state_dict: "more"' in unexpected
    assert "size mismatch for unused: copying a param with shape torch.Size([6])" in size


class Renaming(nn.Module):
    """Takes old checkpoints in two ways that modules in the wild do: a hook, and its own loading code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}old.weight" in state:
            state[f"{prefix}linear.weight"] = state.pop(f"{prefix}old.weight").t()

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}parts" in state:
            state[f"{prefix}linear.bias"] = torch.cat(list(state.pop(f"{prefix}parts")))
        super()._load_from_state_dict(state, prefix, *args)


def load_old() -> None:
    module = shard(nn.Sequential(Renaming()), make_mesh(fsdp=2))
    weight, parts = torch.randn(4, 6), torch.randn(2, 3)
    load_model_state_dict(module, {"0.old.weight": weight, "0.parts": parts})
    torch.manual_seed(0)
    assert_holds(dict(module.state_dict()), {"0.linear.weight": weight.t(), "0.linear.bias": parts.flatten()})


def test_the_modules_own_loading_code_sees_whole_tensors(pool: WorkerPool) -> None:
    pool.run(load_old, world=2)


def regroup(path: Path) -> None:
    module = build({"fsdp": 2, "tp": 2})
    optimizer = trained(module, "adamw")
    state = optimizer_state_dict(optimizer, module, full=False)
    reordered = torch.optim.AdamW([dict(group, params=group["params"][::-1]) for group in optimizer.param_groups])
    load_optimizer_state_dict(reordered, module, state)
    for parameter, values in optimizer.state.items():
        assert_same(whole(reordered.state[parameter]), whole(values))
    with pytest.raises(ParallelConfigError, match="parameters of 2 groups"):
        load_optimizer_state_dict(torch.optim.AdamW(module.parameters()), module, state)
    fewer = torch.optim.AdamW(module.block.parameters())
    with pytest.raises(ParallelConfigError, match=r"none missing, 2 \('embedding.weight', 'unused'\) unexpected"):
        load_optimizer_state_dict(fewer, module, state)
    optimizer.state[module.embedding.weight]["codes"] = torch.zeros(7)
    with pytest.raises(ParallelConfigError, match="'codes' of a sharded parameter as a plain tensor"):
        optimizer_state_dict(optimizer, module, full=True)


def test_optimizer_states_go_by_name(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(regroup, tmp_path)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.1), "foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
]


def every_optimizer(folder: Path) -> None:
    for number, (kind, options) in enumerate(OPTIMIZERS):
        module = build({"fsdp": 2})
        fill(module)
        optimizer = kind(module.parameters(), **options)
        step(module, optimizer, 0)
        full = copy.deepcopy(optimizer_state_dict(optimizer, module, full=True))  # plain tensors are the live ones
        save_sharded(folder / f"{number}", checkpoint_of(module, [optimizer]))
        named = load_sharded(folder / f"{number}", module)["optimizer_states"][0]
        weights = whole(dict(module.state_dict()))
        step(module, optimizer, 1)
        for state in (full, named):
            other = build({"fsdp": 2})
            load_model_state_dict(other, weights)
            resumed = kind(other.parameters(), **options)
            load_optimizer_state_dict(resumed, other, state)
            step(other, resumed, 1)
            where = f"{kind.__name__} {options}"
            assert_same(whole(resumed.state_dict()), whole(optimizer.state_dict()), where)
            assert_same(whole(dict(other.state_dict())), whole(dict(module.state_dict())), where)


def test_torchs_optimizers_resume(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(every_optimizer, tmp_path, world=2)


def callback_loads_a_file(path: Path) -> None:
    module = shard(nn.Sequential(nn.Linear(4, 6)), make_mesh(fsdp=2))
    found = lay_out(read_file(path), module)
    averaged = shard(nn.Sequential(nn.Linear(4, 6)), make_mesh(fsdp=2))
    averaged.load_state_dict(found["state_dict"])
    module.load_state_dict(found["nested"]["current_model_state"])
    expected = torch.load(path)
    assert_holds(dict(averaged.state_dict()), dict(expected["state_dict"]))
    assert_holds(dict(module.state_dict()), expected["nested"]["current_model_state"])
    assert found["epoch"] == 3
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata


def test_a_file_can_be_laid_out_for_callbacks(pool: WorkerPool, tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(4, 6))
    doubled = {name: value * 2 for name, value in module.state_dict().items()}
    checkpoint = {"state_dict": module.state_dict(), "nested": {"current_model_state": doubled}, "epoch": 3}
    torch.save(checkpoint, tmp_path / "file")
    pool.run(callback_loads_a_file, tmp_path / "file", world=2)


def extras(path: Path) -> None:
    module = build({"fsdp": 2})
    fill(module)
    state = model_state_dict(module, full=False)
    averaged = {
        name: value * 2 if value.is_floating_point() else value
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    parts = [{"name": "a", "weight": averaged["unused"]}, {"name": "b"}]
    save_sharded(path, {"state_dict": averaged, "current_model_state": state, "parts": parts, "count": torch.tensor(4)})
    found = load_sharded(path, module)
    assert isinstance(found["current_model_state"]["embedding.weight"], DTensor)
    assert_same(whole(found["current_model_state"]), whole(dict(state)))
    assert_same(whole(found["state_dict"]), whole(averaged))
    assert found["count"] == 4
    assert [part["name"] for part in found["parts"]] == ["a", "b"]
    assert_same(whole(found["parts"][0]["weight"]), whole(averaged["unused"]))


def test_shards_outside_the_state_dict(pool: WorkerPool, tmp_path: Path) -> None:
    """As Lightning's WeightAveraging callback puts them there."""
    pool.run(extras, tmp_path / "folder", world=2)
    found = load_sharded(tmp_path / "folder", None)
    assert found["parts"][0]["weight"].shape == (5,)


def gathered_after_forward(folder: Path) -> None:
    mesh = make_mesh(fsdp=2)
    module = shard(nn.Sequential(nn.Linear(3, 5)), mesh)
    fill(module)
    optimizer = torch.optim.AdamW(module.parameters())
    assert isinstance(module, FSDPModule)
    with torch.no_grad():
        module(torch.ones(1, 3))  # FSDP keeps the root's weights gathered
    state = optimizer_state_dict(optimizer, module, full=False)
    assert state["param_groups"][0]["params"] == ["0.weight", "0.bias"]
    assert all(isinstance(value, DTensor) for value in model_state_dict(module, full=False).values())


def test_after_a_forward_without_a_backward(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(gathered_after_forward, tmp_path, world=2)


def lightning_reads_ours(folder: Path) -> None:
    from lightning.fabric.strategies.model_parallel import _load_checkpoint, _save_checkpoint

    module = shard(nn.Sequential(nn.Linear(4, 6)), make_mesh(fsdp=2))
    optimizer = trained(module, "adamw")
    save_sharded(folder / "ours", checkpoint_of(module, [optimizer]))
    expected = whole(dict(module.state_dict())), whole(optimizer.state_dict())
    _save_checkpoint(
        folder / "theirs", {"state_dict": module, "optimizer_0": optimizer, **META}, False, dist.get_rank()
    )
    dist.barrier()
    fill(module, "other")
    optimizer.zero_grad()  # torch takes gradients for a sign that there is a state
    optimizer = make_optimizer(module, "adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rest = _load_checkpoint(folder / "ours", {"state_dict": module, "optimizer_0": optimizer})
    assert rest == META
    assert_same((whole(dict(module.state_dict())), whole(optimizer.state_dict())), expected)
    fill(module, "other")
    optimizer = make_optimizer(module, "adamw")
    checkpoint = load_sharded(folder / "theirs", module)
    load_model_state_dict(module, checkpoint["state_dict"])
    load_optimizer_state_dict(optimizer, module, checkpoint["optimizer_states"][0])
    assert_same((whole(dict(module.state_dict())), whole(optimizer.state_dict())), expected)


def test_lightnings_strategy_and_ours_read_each_other(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(lightning_reads_ours, tmp_path, world=2)
