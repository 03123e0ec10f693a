"""The shape of the package: imports point one way, devices are not named, private names stay in two files."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import lightning_parallel

ROOT = Path(lightning_parallel.__file__).parent
ADAPTERS = {"_lightning.py", "_torch.py"}  # the only homes of private torch and Lightning names
MAX_LINES = 400

# Where a device may be named, and why.
DEVICE_NAMES = {
    ("_torch.py", "cpu"): "HOST: memory that a file is read into and written from is the host's on every machine",
}
# Private attributes that other files may use, and why there is no public way.
PRIVATE_ATTRIBUTES = {
    "_parameters": "which module owns a parameter, under which name: public iterators give each tied one once",
    "_buffers": "as _parameters",
    "_modules": "as _parameters: named_children leaves out empty places",
    "_non_persistent_buffers_set": "whether a buffer is in the state dict",
    "_metadata": "of a state dict: load_state_dict reads it, nothing public writes it",
    "_device_mesh": "where Lightning's own LightningModule.device_mesh looks",
    "_tp_plan": "the published plan of a Hugging Face model",
    "_sampler": "of Lightning's wrapper around a dataset's sampler",
    "_exit": "os._exit is public",
    "_NormBase": "the class that all of torch's batch and instance norms share",
    "_scaled_dot_product_flash_attention_for_cpu": "an operator of aten: those not for users have such names",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "as the operator that it is the backward of",
    "_foreach_mul_": "torch's own clip_grad_norm_ uses it",
    "_foreach_norm": "as _foreach_mul_",
    "_foreach_clamp_min_": "torch's own clip_grad_value_ uses it",
    "_foreach_clamp_max_": "as _foreach_clamp_min_",
    "_assert_async": "a check of values that does not wait for the device",
    "_make_wrapper_subclass": "how torch documents a tensor subclass without storage",
    "_compiled_call_impl": "what nn.Module.compile() sets: the one place from which a module's call can be taken over",
    "_call_impl": "as _compiled_call_impl: the call with its hooks",
    "_is_param": "torch's mark of a parameter that is a tensor subclass",
    "_is_view": "what is done in place to a view is done to what it is of",
    "_version": "how often a tensor was changed in place",
    "_base": "what a tensor is a view of",
    "_load_csv": "torch's schedules read a file by no other name",
    "_update_count": "of a torchmetrics Metric: how often it was updated",
    "_computed": "of a torchmetrics Metric: its cached result",
    "_defaults": "of a torchmetrics Metric: the names of its states",
    "_forward_cache": "of a torchmetrics Metric: its last batch value, which Lightning logs",
    "_replace": "of every NamedTuple: the underscore keeps it apart from the fields",
    "_asdict": "as _replace",
    "_schema": "of an operator: what it returns anew, and what it changes",
    "_unsafe_view": "as _scaled_dot_product_flash_attention_for_cpu",
    "_reshape_alias": "as _unsafe_view",
    "_C": "torch._C.DisableTorchFunctionSubclass: how torch documents __torch_function__",
}


def sources() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


SOURCES = sources()


def imports(tree: ast.AST, *, at_run_time: bool = True) -> Iterator[tuple[str, str]]:
    """`(module, name)` of everything imported, in functions too; what only a type checker reads left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif not (at_run_time and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from imports(node, at_run_time=at_run_time)


def own_imports(tree: ast.AST) -> set[str]:
    """Files of this package that a file imports."""
    found = set()
    for module, name in imports(tree):
        if module.partition(".")[0] != "lightning_parallel":
            continue
        for dotted in (f"{module}.{name}", module):
            path = "/".join(dotted.split(".")[1:])
            file = next((f for f in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if f in SOURCES), None)
            if file:
                found.add(file)
                break
        else:
            raise AssertionError(f"cannot find {module}.{name}")
    return found


GRAPH = {file: own_imports(tree) for file, tree in SOURCES.items()}


def reachable(file: str) -> set[str]:
    seen: set[str] = set()
    waiting = [file]
    while waiting:
        for other in GRAPH[waiting.pop()] - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def test_there_is_something_to_check() -> None:
    assert {"mesh.py", "schemes/data.py", "strategies/base.py"} <= set(SOURCES)
    assert GRAPH["strategies/hybrid.py"] >= {"mesh.py", "strategies/base.py"}


def test_no_import_goes_round_in_a_circle() -> None:
    # A package's __init__ re-exports its files, so `from package import name` goes to the file that it is in.
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(f"imports form a circle: {' → '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("folder", ["schemes", "checkpoint"])
def test_never_imports_lightning(folder: str) -> None:
    """Neither itself nor through what it imports: the schemes are torch alone."""
    files = [file for file in SOURCES if file.startswith(f"{folder}/")]
    assert files
    for file in files:
        for reached in {file} | reachable(file):
            tops = {module.partition(".")[0] for module, _ in imports(SOURCES[reached])}
            assert not tops & {"lightning", "pytorch_lightning", "lightning_fabric"}, f"{file} via {reached}"


@pytest.mark.parametrize("folder", ["strategies", "callbacks"])
def test_nothing_imports_the_facade(folder: str) -> None:
    importers = {
        file
        for file, imported in GRAPH.items()
        if not file.startswith(f"{folder}/") and any(other.startswith(f"{folder}/") for other in imported)
    }
    assert importers <= {"__init__.py"} | {file for file in SOURCES if file.startswith("strategies/")}


@pytest.mark.parametrize(
    ("lower", "higher"),
    [
        ("errors.py", ["mesh.py", "plan.py", "recipe.py", "step.py", "schemes/", "checkpoint/"]),
        ("mesh.py", ["plan.py", "recipe.py", "step.py", "schemes/", "checkpoint/"]),
        ("plan.py", ["recipe.py", "step.py", "schemes/", "checkpoint/"]),
        ("schemes/", ["recipe.py", "step.py", "checkpoint/"]),
        ("recipe.py", ["step.py", "checkpoint/"]),
        ("checkpoint/", ["recipe.py", "step.py"]),
    ],
)
def test_imports_point_one_way(lower: str, higher: list[str]) -> None:
    """Sizes → mesh → plan → schemes → recipe → step: what comes earlier does not know what comes later."""
    for file in (file for file in SOURCES if file.startswith(lower)):
        wrong = [other for other in reachable(file) if other.startswith(tuple(higher))]
        assert not wrong, f"{file} imports {wrong}"


def test_the_front_holds_no_logic() -> None:
    """`__init__` registers, and finds the public names when they are asked for; type checkers see the same ones."""
    body = SOURCES["__init__.py"].body
    assert {node.name for node in body if isinstance(node, ast.FunctionDef)} == {"__getattr__", "__dir__"}
    assert {type(node) for node in body} <= {ast.Expr, ast.ImportFrom, ast.Assign, ast.If, ast.FunctionDef}
    [checked] = [node for node in body if isinstance(node, ast.If)]
    told = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert told == {name: f"lightning_parallel.{home}" for name, home in lightning_parallel._HOMES.items()}


def test_no_device_is_named() -> None:
    """Devices and backends come from the accelerator: a name in the code is a machine that it does not run on."""
    found = {
        (file, node.value)
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ("cpu", "cuda", "gloo", "nccl", "mps", "xpu")
    }
    assert found == set(DEVICE_NAMES)


def test_private_modules_and_names_are_imported_in_the_adapters_only() -> None:
    found = {
        f"{file}: {module}.{name}"
        for file, tree in SOURCES.items()
        if file not in ADAPTERS
        for module, name in imports(tree, at_run_time=False)
        if module.partition(".")[0] in ("torch", "lightning", "torchmetrics")
        and any(part.startswith("_") and part != "__future__" for part in [*module.split("."), name])
    }
    assert not found


def test_private_attributes_are_few_and_have_reasons() -> None:
    """Private attributes of other objects than `self`, that this package does not define itself."""
    own: set[str] = set()
    used: dict[str, set[str]] = defaultdict(set)
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                own.update(target.id for target in targets if isinstance(target, ast.Name))
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                if isinstance(node.ctx, ast.Store):
                    own.add(node.attr)
            elif file not in ADAPTERS:
                used[node.attr].add(file)
    foreign = {name: files for name, files in used.items() if name in PRIVATE_ATTRIBUTES or name not in own}
    assert set(foreign) <= set(PRIVATE_ATTRIBUTES), foreign
    assert set(PRIVATE_ATTRIBUTES) <= set(foreign), "an entry of the list is not needed any more"


@pytest.mark.parametrize("file", SOURCES)
def test_files_are_short(file: str) -> None:
    assert len((ROOT / file).read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("file", SOURCES)
def test_files_say_what_they_are(file: str) -> None:
    if SOURCES[file].body:
        assert ast.get_docstring(SOURCES[file])
