"""Sizes and "auto", coordinates, and the mesh's views: rank r of many in one process, on torch's fake backend."""

from __future__ import annotations

import itertools
import re
import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_parallel import (
    ContextParallel,
    DataParallel,
    FullyShardedDataParallel,
    HybridParallel,
    ParallelConfigError,
    PipelineParallel,
    TensorParallel,
)
from lightning_parallel.mesh import MeshSizes, ParallelMesh, ResolvedSizes, divisors
from tests.support.fake import fake_world
from tests.support.meshes import factorisations

AXES = ("pp", "ddp", "fsdp", "cp", "tp")


@pytest.mark.parametrize(
    ("sizes", "world", "expected"),
    [
        ({}, 1, (1, 1, 1)),
        ({"fsdp": "auto"}, 8, (1, 8, 1)),
        ({"fsdp": "auto", "tp": 2}, 8, (1, 4, 2)),
        ({"ddp": "auto", "fsdp": 2, "tp": 2}, 8, (2, 2, 2)),
        ({"ddp": 2, "fsdp": 2, "tp": "auto"}, 4, (2, 2, 1)),
        ({"ddp": 3, "tp": 2}, 6, (3, 1, 2)),
        ({"ddp": 8, "fsdp": "auto", "tp": 8}, 1024, (8, 16, 8)),
        ({"pp": 2, "ddp": 8, "fsdp": "auto", "tp": 8}, 1024, (8, 8, 8)),
        ({"pp": "auto", "tp": 2}, 8, (1, 1, 2)),
    ],
)
def test_sizes_resolve(sizes: dict[str, Any], world: int, expected: tuple[int, int, int]) -> None:
    resolved = MeshSizes(**sizes).resolve(world)
    assert (resolved.ddp, resolved.fsdp, resolved.tp) == expected
    assert resolved.world == resolved.pp * resolved.ddp * resolved.fsdp * resolved.tp == world
    assert resolved.data == expected[0] * expected[1]


@pytest.mark.parametrize(
    ("sizes", "world", "seen", "remedy"),
    [
        ({"tp": 3}, 4, "tp=3 does not fit 4 devices: the product is 3", "Use tp=4, or 3 devices."),
        ({"fsdp": "auto", "tp": 3}, 8, "8 is not a multiple of 3", "Use tp=2 or tp=4, or a multiple of 3 devices."),
        ({"fsdp": "auto", "tp": 16}, 8, "8 is not a multiple of 16", "Use tp=8, or a multiple of 16 devices."),
        ({"ddp": 2, "fsdp": 2, "tp": 2}, 4, "the product is 8", "Use ddp=1 or fsdp=1 or tp=1, or 8 devices."),
        ({"ddp": 2, "fsdp": 3}, 8, "ddp=2 × fsdp=3 does not fit 8", "Use fsdp=4, or 6 devices."),
        ({"ddp": 3, "fsdp": 3, "tp": 3}, 8, "the product is 27", "Use 27 devices, or give one axis the size 8"),
        ({}, 4, "the product is 1", "Use 1 device, or give one axis the size 4"),
        ({"ddp": 5, "fsdp": "auto", "tp": 3}, 8, "8 is not a multiple of 15", "give one axis the size 8"),
    ],
)
def test_a_product_that_does_not_fit_names_what_does(sizes: dict[str, Any], world: int, seen: str, remedy: str) -> None:
    with pytest.raises(ParallelConfigError) as caught:
        MeshSizes(**sizes).resolve(world)
    assert seen in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("world", [4, 6, 12])
def test_every_remedy_works(world: int) -> None:
    """What the message offers is tried: each `axis=size` in it gives sizes that resolve."""
    tried = 0
    for ddp, fsdp, tp in itertools.product((1, 2, 3, 5), (1, 2, 4, "auto"), (1, 2, 3, 7)):
        sizes: dict[str, Any] = {"ddp": ddp, "fsdp": fsdp, "tp": tp}
        for axis, size in re.findall(r"(ddp|fsdp|tp)=(\d+)", _remedy(sizes, world)):
            assert MeshSizes(**{**sizes, axis: int(size)}).resolve(world).world == world
            tried += 1
    assert tried > 10


def _remedy(sizes: dict[str, Any], world: int) -> str:
    try:
        MeshSizes(**sizes).resolve(world)
    except ParallelConfigError as error:
        return str(error).partition(". ")[2]
    return ""


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", "Auto", None, True, [2]])
def test_a_size_is_a_positive_integer_or_auto(size: Any) -> None:
    with pytest.raises(ParallelConfigError, match=r'tp=.*a size is a positive integer or "auto"'):
        MeshSizes(tp=size)


@pytest.mark.parametrize("axes", [("ddp", "fsdp"), ("ddp", "tp"), ("fsdp", "tp"), AXES])
def test_two_autos(axes: tuple[str, ...]) -> None:
    with pytest.raises(ParallelConfigError, match="only one axis can take the devices left over") as caught:
        MeshSizes(**dict.fromkeys(axes, "auto"))
    assert all(f'{axis}="auto"' in str(caught.value) for axis in axes)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert divisors(1) == [1]


# --- what the strategies make of their arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (lambda: HybridParallel(), (1, 8, 1)),
        (lambda: HybridParallel(tp=2), (1, 4, 2)),
        (lambda: HybridParallel(ddp="auto", tp=2), (4, 1, 2)),  # the default "auto" of fsdp gives way
        (lambda: HybridParallel(ddp=2, fsdp=FullyShardedDataParallel(), tp=TensorParallel(2)), (2, 2, 2)),
        (lambda: HybridParallel(ddp=DataParallel(8), fsdp=1), (8, 1, 1)),
        (lambda: DataParallel(), (8, 1, 1)),
        (lambda: FullyShardedDataParallel(8), (1, 8, 1)),
        (lambda: TensorParallel(), (1, 1, 8)),
        (lambda: HybridParallel(cp=ContextParallel(2), tp=2), (1, 2, 2)),
        (lambda: ContextParallel(), (1, 1, 1)),
    ],
)
def test_strategies_turn_arguments_into_sizes(strategy: Any, expected: tuple[int, int, int]) -> None:
    resolved = strategy()._requested.resolve(8)
    assert (resolved.ddp, resolved.fsdp, resolved.tp) == expected
    assert resolved.world == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ddp": "auto", "tp": "auto"}, 'ddp="auto" and tp="auto"'),
        ({"fsdp": FullyShardedDataParallel("auto"), "tp": "auto"}, 'fsdp="auto" and tp="auto"'),
        ({"tp": 2.5}, "tp=2.5: a size is a positive integer"),
        ({"tp": "2"}, "tp='2': a size is a positive integer"),
        ({"fsdp": 0}, "fsdp=0: a size is a positive integer"),
        ({"tp": FullyShardedDataParallel(2)}, r"tp=FullyShardedDataParallel\(…\): this axis takes a TensorParallel"),
        ({"fsdp": HybridParallel()}, r"fsdp=HybridParallel\(…\): this axis takes a FullyShardedDataParallel"),
        ({"cp": TensorParallel()}, r"cp=TensorParallel\(…\): this axis takes a ContextParallel"),
        ({"pp": TensorParallel()}, r"pp=TensorParallel\(…\): this axis takes a PipelineParallel"),
        ({"pp": PipelineParallel("auto"), "tp": "auto"}, 'pp="auto" and tp="auto"'),
        ({"ddp": TensorParallel()}, r"ddp=TensorParallel\(…\): this axis takes a DataParallel"),
    ],
)
def test_arguments_that_make_no_mesh(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        HybridParallel(**arguments)


# --- coordinates and views --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", factorisations(8, AXES), ids=str)
def test_coordinates_count_tp_fastest(sizes: dict[str, int]) -> None:
    resolved = ResolvedSizes(**sizes)
    for rank in range(8):
        where = resolved.coordinates(rank)
        data = where["ddp"] * sizes["fsdp"] + where["fsdp"]
        assert rank == ((where["pp"] * resolved.data + data) * sizes["cp"] + where["cp"]) * sizes["tp"] + where["tp"]
        assert resolved.data_rank(rank) == data
        assert all(0 <= where[axis] < sizes[axis] for axis in AXES)


def test_str_leaves_out_axes_of_one() -> None:
    assert str(ResolvedSizes(fsdp=4, tp=2)) == "fsdp=4 × tp=2"
    assert str(ResolvedSizes()) == "one device"


def test_the_views_of_rank_5_of_8() -> None:
    """ddp=2 × fsdp=2 × tp=2: rank 5 is replica 1, shard 0, tensor part 1."""
    with fake_world(5, 8):
        mesh = ParallelMesh("cpu", ResolvedSizes(ddp=2, fsdp=2, tp=2))
        assert mesh.device_mesh.mesh_dim_names == AXES
        assert mesh.device_mesh.get_coordinate() == (0, 1, 0, 0, 1)
        assert dist.get_process_group_ranks(mesh.tp.get_group()) == [4, 5]
        assert dist.get_process_group_ranks(mesh.ddp.get_group()) == [1, 5]
        assert mesh.fully_shard.mesh_dim_names == ("ddp", "fsdp")
        assert dist.get_process_group_ranks(mesh.fully_shard.get_group("fsdp")) == [5, 7]
        assert dist.get_process_group_ranks(mesh.data_group) == [1, 3, 5, 7]
        assert mesh.data_rank == 2


def test_stages_of_one_replica_see_the_same_samples() -> None:
    """pp=2 × fsdp=2 × tp=2: rank 5 is on the second stage, shard 0, tensor part 1."""
    with fake_world(5, 8):
        mesh = ParallelMesh("cpu", ResolvedSizes(pp=2, fsdp=2, tp=2))
        assert dist.get_process_group_ranks(mesh.pp.get_group()) == [1, 5]
        assert dist.get_process_group_ranks(mesh.data_group) == [5, 7]
        assert [mesh.sizes.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
        assert dist.get_process_group_ranks(mesh.pipeline_groups([frozenset({0, 1})])[frozenset({0, 1})]) == [1, 5]


@pytest.mark.parametrize("sizes", factorisations(8, AXES), ids=str)
def test_views_agree_with_coordinates_on_every_mesh_of_8(sizes: dict[str, int]) -> None:
    resolved = ResolvedSizes(**sizes)
    with fake_world(5, 8):
        mesh = ParallelMesh("cpu", resolved)
        here = resolved.coordinates(5)
        assert dict(zip(AXES, mesh.device_mesh.get_coordinate() or (), strict=True)) == here
        assert mesh.data_rank == resolved.data_rank(5)
        peers = [
            rank
            for rank in range(8)
            if all(resolved.coordinates(rank)[axis] == here[axis] for axis in ("pp", "cp", "tp"))
        ]
        assert dist.get_process_group_ranks(mesh.data_group) == peers
        averaged = [
            rank for rank in range(8) if all(resolved.coordinates(rank)[axis] == here[axis] for axis in ("pp", "tp"))
        ]
        assert dist.get_process_group_ranks(mesh.averaged_group) == averaged
        shards = "fsdp_cp" if sizes["cp"] > 1 else "fsdp"
        assert mesh.fully_shard.mesh_dim_names == (("ddp", shards) if sizes["ddp"] > 1 else (shards,))
        assert mesh.fully_shard[shards].size() == sizes["fsdp"] * sizes["cp"]


@pytest.mark.parametrize(("ddp", "fsdp", "tp"), [(1, 1024, 1), (1, 1, 1024), (8, 16, 8), (4, 32, 8), (1024, 1, 1)])
@pytest.mark.parametrize("rank", [0, 517, 1023])
def test_1024_ranks(ddp: int, fsdp: int, tp: int, rank: int) -> None:
    sizes = ResolvedSizes(ddp=ddp, fsdp=fsdp, tp=tp)
    start = time.process_time()
    with fake_world(rank, 1024):
        mesh = ParallelMesh("cpu", sizes)
        data = dist.get_process_group_ranks(mesh.data_group)
        assert data == list(range(rank % tp, 1024, tp))
        assert data[mesh.data_rank] == rank
        first = rank - rank % tp
        assert dist.get_process_group_ranks(mesh.tp.get_group()) == list(range(first, first + tp))
    assert time.process_time() - start < 5  # seconds of this process; every rank builds its mesh at start-up
