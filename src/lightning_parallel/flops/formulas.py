"""FLOPs of a training step by formula, in place of counting operations.

Each counts forward and backward without recomputation, for one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_parallel.errors import ParallelConfigError

TRAINED, PASSED_THROUGH, FROZEN = 6, 4, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSizes:
    """What PaLM's formula needs.

    Attributes:
        parameters: All of them, tied ones once.
        layers: Blocks with attention.
        heads: Heads of the queries.
        head_dim: Size of a head.
    """

    parameters: int
    layers: int
    heads: int
    head_dim: int


def palm_flops_per_token(sizes: TransformerSizes, length: int, *, causal: bool = False) -> float:
    """``6·N + 12·L·H·Q·T`` (PaLM, arXiv:2204.02311, appendix B).

    N parameters, each in one multiplication and addition forward and two backward; L layers of H heads of size Q, whose
    scores and weighted sums are over T keys.

    Args:
        sizes: N, L, H and Q.
        length: T, in tokens.
        causal: Count only the half of the pairs that a causal mask leaves.
    """
    attention = 12.0 * sizes.layers * sizes.heads * sizes.head_dim * length
    return 6.0 * sizes.parameters + (attention / 2 if causal else attention)


def transformer_sizes(module: nn.Module) -> TransformerSizes:
    """Read from the ``config`` of a Hugging Face model, wherever it is in the module.

    Raises:
        ParallelConfigError: There is none, or it lacks a size.
    """
    for child in module.modules():
        config = getattr(child, "config", None)
        layers = _first(config, "num_hidden_layers", "n_layer", "num_layers")
        heads = _first(config, "num_attention_heads", "n_head")
        width = _first(config, "hidden_size", "n_embd", "d_model")
        if layers and heads and width:
            head_dim = _first(config, "head_dim") or width // heads
            return TransformerSizes(
                parameters=count_parameters(module), layers=layers, heads=heads, head_dim=head_dim
            )  # fmt: skip
    raise ParallelConfigError(
        f'flops="palm" needs the layers, heads and head size of {type(module).__name__}, and no module in it has a '
        'config with num_hidden_layers, num_attention_heads and hidden_size. Use flops="count", or pass a function '
        "(see palm_flops_per_token)."
    )


def count_parameters(module: nn.Module) -> int:
    """Numbers in all parameters, tied ones once."""
    return sum(parameter.numel() for parameter in module.parameters())


def matmul_flops_per_token(module: nn.Module) -> float:
    """6, 4 or 2 FLOPs for each number in a matrix, without attention.

    6 where it is trained; 4 where it is frozen and something below it is trained, so that gradients pass through; 2
    where nothing below it is. Below is what was registered earlier. Embeddings look up and count nothing, unless their
    matrix is tied to a layer that multiplies with it. Vectors (biases, norms) count nothing.
    """
    total, seen = 0.0, set[int]()
    is_trained_below = False
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            is_lookup = isinstance(child, nn.Embedding | nn.EmbeddingBag)
            if parameter.ndim > 1 and not is_lookup and id(parameter) not in seen:
                seen.add(id(parameter))
                factor = TRAINED if parameter.requires_grad else PASSED_THROUGH if is_trained_below else FROZEN
                total += factor * parameter.numel()
            is_trained_below |= parameter.requires_grad
    return total


def _first(config: Any, *names: str) -> int | None:
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
