"""Checkpoints in one process: names, URLs, errors, the command line."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_parallel.__main__ import main
from lightning_parallel.checkpoint import (
    consolidate,
    is_sharded_checkpoint,
    load_model_state_dict,
    load_optimizer_state_dict,
    load_sharded,
    model_state_dict,
    optimizer_state_dict,
    read_file,
    remove,
    save_sharded,
)
from lightning_parallel.checkpoint.storage import on_first_rank, write_file
from lightning_parallel.checkpoint.tree import flatten, put_back, take_shards
from lightning_parallel.errors import ParallelConfigError
from tests.support.checkpoints import META, Toy, assert_same, checkpoint_of, fill, make_optimizer, trained


def save_toy(path: str | Path, kind: str = "adamw") -> tuple[Toy, torch.optim.Optimizer]:
    module = Toy()
    optimizer = trained(module, kind)
    save_sharded(path, checkpoint_of(module, [optimizer]))
    return module, optimizer


class TestNames:
    def wrapped(self) -> nn.Module:
        module = Toy()
        module.block = torch.compile(checkpoint_wrapper(module.block))  # type: ignore[assignment]
        return module

    def test_wrappers_leave_no_trace(self) -> None:
        module = self.wrapped()
        optimizer = trained(module, "adamw")
        assert list(module.state_dict()) != list(Toy().state_dict())
        assert list(model_state_dict(module, full=False)) == list(Toy().state_dict())
        names = optimizer_state_dict(optimizer, module, full=False)["param_groups"]
        assert {name for group in names for name in group["params"]} == {name for name, _ in Toy().named_parameters()}

    def test_every_wrapping_loads_every_other(self) -> None:
        plain = Toy()
        fill(plain)
        wrapped = self.wrapped()
        load_model_state_dict(wrapped, plain.state_dict())
        assert_same(dict(model_state_dict(wrapped, full=False)), dict(plain.state_dict()))
        other = Toy()
        load_model_state_dict(other, wrapped.state_dict())
        assert_same(dict(other.state_dict()), dict(plain.state_dict()))

    def test_versions_of_modules_are_kept(self) -> None:
        module = nn.Sequential(nn.BatchNorm1d(3))
        state = model_state_dict(module, full=True)
        assert state._metadata == module.state_dict()._metadata  # type: ignore[attr-defined]
        del state["0.num_batches_tracked"]
        with pytest.raises(RuntimeError, match="num_batches_tracked"):
            load_model_state_dict(module, state)
        load_model_state_dict(module, dict(state))  # torch's upgrade of old files, which have no versions

    def test_a_tied_weight_is_found_under_each_of_its_names(self) -> None:
        module = Toy()
        optimizer = trained(module, "adamw")
        state = optimizer_state_dict(optimizer, module, full=False)
        renamed = {"embedding.weight": "head.weight"}
        state["state"] = {renamed.get(name, name): value for name, value in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [renamed.get(name, name) for name in group["params"]]
        other = make_optimizer(module, "adamw")
        load_optimizer_state_dict(other, module, state)
        assert_same(other.state_dict(), optimizer.state_dict())


class TestOptimizers:
    @pytest.mark.parametrize("full", [False, True])
    def test_before_the_first_step(self, full: bool) -> None:
        module = Toy()
        optimizer = make_optimizer(module, "adamw")
        optimizer.param_groups[1]["lr"] = 7.0
        state = optimizer_state_dict(optimizer, module, full=full)
        other = make_optimizer(module, "adamw")
        load_optimizer_state_dict(other, module, state)
        assert other.param_groups[1]["lr"] == 7.0
        assert not other.state

    def test_a_state_replaces_another(self) -> None:
        module = Toy()
        optimizer = trained(module, "adamw")
        fresh = optimizer_state_dict(make_optimizer(module, "adamw"), module, full=False)
        load_optimizer_state_dict(optimizer, module, fresh)
        assert not optimizer.state

    def test_state_that_is_no_tensor(self, tmp_path: Path) -> None:
        module = Toy()
        optimizer = make_optimizer(module, "sgd")
        values = {"momentum_buffer": None, "history": [1, 2], "by_number": {1: 2.0}, "empty": {}}
        optimizer.state[module.unused] = values
        save_sharded(tmp_path / "folder", checkpoint_of(module, [optimizer]))
        (state,) = load_sharded(tmp_path / "folder", module)["optimizer_states"]
        other = make_optimizer(module, "sgd")
        load_optimizer_state_dict(other, module, state)
        assert dict(other.state[module.unused]) == values

    def test_torchs_own_errors(self) -> None:
        module = Toy()
        state = make_optimizer(module, "adamw").state_dict()
        with pytest.raises(ValueError, match="different number of parameter groups"):
            load_optimizer_state_dict(make_optimizer(module, "sgd"), module, state)

    def test_a_parameter_of_another_module(self) -> None:
        optimizer = make_optimizer(Toy(), "sgd")
        with pytest.raises(ParallelConfigError, match="that is not the module's"):
            optimizer_state_dict(optimizer, Toy(), full=False)

    def test_loaded_state_shares_no_memory_with_the_file(self, tmp_path: Path) -> None:
        module = Toy()
        optimizer = trained(module, "adamw")
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        state = read_file(tmp_path / "state.pt")
        other = make_optimizer(module, "adamw")
        load_optimizer_state_dict(other, module, state)
        moment = other.state[module.embedding.weight]["exp_avg"]
        assert moment.data_ptr() != state["state"][0]["exp_avg"].data_ptr()


def fail(*_: Any, **__: Any) -> None:
    raise OSError("disk full")


class TestFolders:
    @pytest.mark.parametrize("url", [False, True])
    def test_url(self, tmp_path: Path, url: bool) -> None:
        path = f"memory://{tmp_path.name}/run/last.ckpt" if url else f"file://{tmp_path}/run/last.ckpt"
        module, optimizer = save_toy(path)
        save_toy(path)  # replaces it
        assert is_sharded_checkpoint(path)
        found = load_sharded(path, Toy())
        assert_same(found["state_dict"], dict(module.state_dict()))
        consolidate(path, path + ".file")
        assert_same(read_file(path + ".file")["optimizer_states"][0], optimizer.state_dict())
        fs, where = fsspec.url_to_fs(path)
        assert sorted(Path(name).name for name in fs.ls(where.rpartition("/")[0], detail=False)) == [
            "last.ckpt",
            "last.ckpt.file",
        ]
        remove(path)
        assert not fs.exists(where)
        remove(path)

    def test_weights_alone(self, tmp_path: Path) -> None:
        module = Toy()
        fill(module)
        save_sharded(tmp_path / "folder", {**META, "state_dict": model_state_dict(module, full=False)})
        found = load_sharded(tmp_path / "folder", Toy())
        assert "optimizer_states" not in found
        assert_same(found["state_dict"], dict(module.state_dict()))

    def test_without_optimizers(self, tmp_path: Path) -> None:
        save_toy(tmp_path / "folder")
        assert load_sharded(tmp_path / "folder", Toy(), optimizers=False).keys() == {*META, "state_dict"}

    def test_no_optimizers_and_an_empty_list_differ(self, tmp_path: Path) -> None:
        save_sharded(tmp_path / "folder", {"state_dict": {}, "optimizer_states": []})
        assert load_sharded(tmp_path / "folder", None) == {"state_dict": {}, "optimizer_states": []}

    def test_other_dtype(self, tmp_path: Path) -> None:
        module = Toy().bfloat16()
        fill(module)
        save_sharded(tmp_path / "folder", {"state_dict": model_state_dict(module, full=False)})
        other = Toy()
        load_model_state_dict(other, load_sharded(tmp_path / "folder", other)["state_dict"])
        assert_same(other.head.weight.detach(), module.head.weight.detach().float())

    def test_empty_and_scalar_tensors(self, tmp_path: Path) -> None:
        state = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "bits": torch.tensor([True, False])}
        save_sharded(tmp_path / "folder", {"state_dict": state})
        assert_same(load_sharded(tmp_path / "folder", None)["state_dict"], state)

    def test_a_run_that_dies_while_saving_leaves_the_old_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "last.ckpt"
        module, _ = save_toy(path)
        monkeypatch.setattr(torch, "save", fail)
        other = Toy()
        fill(other, "other")
        with pytest.raises(RuntimeError, match="rank 0: OSError: disk full"):
            save_sharded(path, {"state_dict": model_state_dict(other, full=False)})
        monkeypatch.undo()
        assert_same(load_sharded(path, Toy())["state_dict"], dict(module.state_dict()))
        save_sharded(path, {"state_dict": model_state_dict(other, full=False)})
        assert_same(load_sharded(path, Toy())["state_dict"], dict(other.state_dict()))
        assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]

    def test_a_shard_that_is_missing(self, tmp_path: Path) -> None:
        save_toy(tmp_path / "folder")
        (tmp_path / "folder" / "__0_0.distcp").unlink()
        with pytest.raises(FileNotFoundError):
            load_sharded(tmp_path / "folder", Toy())


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


class TestWeightsOnly:
    def test_index(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_toy(tmp_path / "folder")
        (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Evil()))
        with pytest.raises(pickle.UnpicklingError, match=r"builtins\.print"):
            load_sharded(tmp_path / "folder", Toy())
        assert capsys.readouterr().out == ""

    def test_rest_and_extra_state(self, tmp_path: Path) -> None:
        module = Toy()
        module.note = Path("some/where")
        state = model_state_dict(module, full=False)
        save_sharded(tmp_path / "folder", {"state_dict": state})
        with pytest.raises(pickle.UnpicklingError):
            load_sharded(tmp_path / "folder", module)
        assert (
            load_sharded(tmp_path / "folder", module, weights_only=False)["state_dict"]["_extra_state"] == module.note
        )
        save_sharded(tmp_path / "rest", {"state_dict": {}, "hyper_parameters": Path("some/where")})
        with pytest.raises(pickle.UnpicklingError):
            load_sharded(tmp_path / "rest", module)
        assert load_sharded(tmp_path / "rest", module, weights_only=False)["hyper_parameters"] == module.note

    def test_file(self, tmp_path: Path) -> None:
        torch.save({"where": Path("x")}, tmp_path / "file")
        with pytest.raises(pickle.UnpicklingError):
            read_file(tmp_path / "file")
        assert read_file(tmp_path / "file", weights_only=False) == {"where": Path("x")}


class TestFiles:
    def test_a_file_from_before_torch_1_6(self, tmp_path: Path) -> None:
        torch.save({"a": torch.ones(2)}, tmp_path / "old", _use_new_zipfile_serialization=False)
        assert_same(read_file(tmp_path / "old"), {"a": torch.ones(2)})

    def test_a_failed_write_leaves_the_old_file(self, tmp_path: Path) -> None:
        write_file(tmp_path / "file", {"a": 1})
        with pytest.raises(Exception, match="pickle"):
            write_file(tmp_path / "file", {"a": lambda: None})
        assert read_file(tmp_path / "file") == {"a": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["file"]

    def test_remove_takes_the_link_and_leaves_its_target(self, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "folder")
        remove(tmp_path / "link")
        assert [p.name for p in tmp_path.iterdir()] == ["folder"]

    def test_on_first_rank_without_a_process_group(self) -> None:
        assert on_first_rank(lambda: 3) == 3


class TestTree:
    def test_names_of_leaves(self) -> None:
        tree = {"a": {"b.c": torch.ones(1), "d": [{"e": 1}, {"e": (2,)}], "f": [1, 2], "g": {}, "h": {1: 2}}}
        found = {name: path for name, (path, _) in flatten(tree).items()}
        assert found == {
            "a.b.c": ("a", "b.c"),
            "a.d.0.e": ("a", "d", 0, "e"),
            "a.d.1.e": ("a", "d", 1, "e"),
            "a.f": ("a", "f"),
            "a.g": ("a", "g"),
            "a.h": ("a", "h"),
        }

    def test_two_values_of_one_name(self) -> None:
        with pytest.raises(ParallelConfigError, match=r"two values named 'a\.b\.c'"):
            flatten({"a": {"b.c": 1, "b": {"c": 2}}})

    def test_nothing_to_take(self) -> None:
        tree = {"a": [1, {"b": torch.ones(1)}]}
        assert take_shards(tree) == (None, tree)
        assert put_back(tree, {}) == tree


class TestCommand:
    def run(self, *arguments: Any) -> int:
        return main(["consolidate", *map(str, arguments)])

    def test_makes_a_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        module, optimizer = save_toy(tmp_path / "folder")
        assert self.run(tmp_path / "folder", tmp_path / "deep" / "file.ckpt") == 0
        found = torch.load(tmp_path / "deep" / "file.ckpt", weights_only=True)
        expected = {**META, "state_dict": dict(module.state_dict()), "optimizer_states": [optimizer.state_dict()]}
        assert_same(found, expected)
        assert capsys.readouterr().err == ""

    def test_errors(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_toy(tmp_path / "folder")
        (tmp_path / "file").write_text("")
        (tmp_path / "empty").mkdir()
        for source, target, message in [
            ("nothing", "new", "There is nothing at"),
            ("file", "new", "one file already"),
            ("empty", "new", "not a checkpoint folder: it has no meta.pt"),
            ("folder", "empty", "is a folder; give the name of the file"),
            ("folder", "file", "exists"),
        ]:
            assert self.run(tmp_path / source, tmp_path / target) == 2
            error = capsys.readouterr().err
            assert message in error
            assert "Traceback" not in error
        assert self.run(tmp_path / "folder", tmp_path / "file", "--overwrite") == 0
        (tmp_path / "folder" / ".metadata").write_bytes(b"not a pickle")
        assert self.run(tmp_path / "folder", tmp_path / "new") == 2
        (tmp_path / "folder" / ".metadata").unlink()
        assert self.run(tmp_path / "folder", tmp_path / "new") == 2

    def test_objects_need_trust(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        save_sharded(tmp_path / "folder", {"state_dict": {}, "hyper_parameters": {"root": Path("x")}})
        assert self.run(tmp_path / "folder", tmp_path / "file") == 2
        assert "--no-weights-only" in capsys.readouterr().err
        assert self.run(tmp_path / "folder", tmp_path / "file", "--no-weights-only") == 0

    def test_usage(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["consolidate"])
        assert caught.value.code == 2
        assert "SRC" in capsys.readouterr().err

    def test_as_a_module(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "lightning_parallel", "consolidate", "nothing", "new"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert done.stderr.endswith("There is nothing at nothing.\n")
