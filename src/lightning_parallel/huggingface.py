"""Reads the plans that Hugging Face models publish: ``_tp_plan`` into roles, ``_pp_plan`` into an order.

Nothing is imported from ``transformers``: a model is recognised by what it carries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_parallel.errors import PlanError
from lightning_parallel.plan import ParallelPlan, Role, matches

# Their styles that say the same as one of our roles. ``*_gather_output`` marks code that needs global sizes: there the
# projection is split all the same, but its output keeps the global view.
_ROLES: Mapping[str, str] = {
    "colwise": "colwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise": "rowwise",
    "rowwise_split_input": "rowwise",
    "replicated_with_grad_allreduce": "norm",
    "embedding_rowwise": "vocab_in",
}
_GLOBAL = frozenset({"colwise_gather_output", "colwise_rep", "rowwise_split_input"})


def published_plan(module: nn.Module) -> ParallelPlan | None:
    """The plan of the Hugging Face models inside ``module``, or ``None`` where there is none.

    Raises:
        PlanError: The published plan has a style that cannot keep the numbers yet (experts, for example).
    """
    roles: dict[str, str] = {}
    source = ""
    for name, model in module.named_modules():
        if any(matches(name, f"{outer}.**") for outer in [source] if outer):
            continue
        if _is_pretrained(model) and (published := _published(model)):
            roles |= _translate(name, model, published)
            source = name
    if not roles:
        return None
    return ParallelPlan(roles, f"{type(module.get_submodule(source)).__name__}'s published _tp_plan")


def published_order(model: nn.Module) -> list[nn.Module]:
    """The children of a Hugging Face model that its ``_pp_plan`` names, in the order in which they run.

    A base model publishes all of its parts, a model for some task only what follows its base model (``lm_head``). The
    plans of its children, which ``transformers`` puts after its own with dotted names, are left to them.
    """
    if not _is_pretrained(model):
        return []
    plans = [getattr(getattr(model, "config", None), "base_model_pp_plan", None), getattr(model, "_pp_plan", None)]
    names = dict.fromkeys(name for plan in plans if isinstance(plan, Mapping) for name in plan)
    return [child for name in names if (child := model._modules.get(name)) is not None]


def share_heads(module: nn.Module, roles: Mapping[str, Role], tp_size: int) -> None:
    """Where ranks share a key/value head, tell the attention how many query heads each of its heads serves."""
    for name, attention in module.named_modules():
        if not isinstance(getattr(attention, "num_key_value_groups", None), int):
            continue
        heads = sorted({role.heads for n, role in roles.items() if n.rpartition(".")[0] == name and role.heads})
        if heads and heads[0] < tp_size:
            attention.num_key_value_groups = heads[-1] // tp_size


def _is_pretrained(module: nn.Module) -> bool:
    return hasattr(module, "config") and hasattr(module, "_tp_plan") and hasattr(module, "get_input_embeddings")


def _published(model: Any) -> dict[str, str]:
    return {str(glob): style for glob, style in dict(getattr(model, "tp_plan", None) or model._tp_plan or {}).items()}


def _translate(prefix: str, model: Any, published: Mapping[str, str]) -> dict[str, str]:
    dotted = f"{prefix}." if prefix else ""
    names = dict(model.named_modules())
    roles: dict[str, str] = {}
    for glob, style in published.items():
        matched = [name for name in names if matches(name, glob)]
        if style not in _ROLES:
            raise PlanError(
                f"{type(model).__name__} publishes the style {style!r} for {glob!r}, which tensor parallelism does not "
                f"know (it knows {', '.join(_ROLES)}). Pass plan= with roles of your own, or use tp=1."
            )
        for name in matched:
            roles[name] = _ROLES[style]
            parent = name.rpartition(".")[0]
            if style in _GLOBAL or (parent in roles and roles[parent] != "local"):
                continue
            if _ROLES[style] == "rowwise" and parent and _all_local(names[parent], parent, published):
                roles[parent] = "local"
    _name_vocabulary(model, names, roles)
    for name in list(roles):
        heads = _heads(names[name.rpartition(".")[0]], name.rpartition(".")[2]) if roles[name] == "colwise" else None
        if heads:
            roles[name] = f"colwise(heads={heads})"
    return {dotted + name: role for name, role in roles.items()}


def _all_local(parent: nn.Module, name: str, published: Mapping[str, str]) -> bool:
    """Whether every published style below ``parent`` lets its code run on local shards."""
    styles = {
        style
        for child, _ in parent.named_modules(prefix=name)
        for glob, style in published.items()
        if matches(child, glob)
    }
    return not styles & _GLOBAL


def _name_vocabulary(model: Any, names: Mapping[str, nn.Module], roles: dict[str, str]) -> None:
    """Give the input embedding and the head their roles; where they are tied they must be split alike."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    by_id = {id(module): name for name, module in names.items()}
    if isinstance(embedding, nn.Embedding) and id(embedding) in by_id:
        roles[by_id[id(embedding)]] = "vocab_in"
    if isinstance(head, nn.Linear) and id(head) in by_id:
        roles[by_id[id(head)]] = "vocab_out"


def _heads(attention: Any, projection: str) -> int | None:
    """How many heads an attention projection makes, as the model's configuration says."""
    config = getattr(attention, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    kind = type(attention).__name__.lower()
    if heads is None or not ("attn" in kind or "attention" in kind):
        return None
    if projection in ("k_proj", "v_proj"):
        return int(getattr(config, "num_key_value_heads", None) or heads)
    return int(heads) if projection in ("q_proj", "query_key_value") else None
