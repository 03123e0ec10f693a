"""Which of torch's functions keep a tensor in rows.

A handler takes the function and its arguments, a `SequenceShard` among them, and gives the result, or
``NotImplemented`` where it needs the full tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.schemes.context import elementwise as tokens
from lightning_parallel.schemes.context import reductions, shapes
from lightning_parallel.schemes.context.rows import Handler

_UNARY = """
    abs neg exp expm1 log log1p log2 log10 sqrt rsqrt square reciprocal sigmoid tanh sin cos tan erf relu relu6 gelu
    silu elu celu selu leaky_relu softplus softsign hardtanh hardsigmoid hardswish mish logsigmoid tanhshrink threshold
    clamp clamp_min clamp_max clip nan_to_num round floor ceil trunc sign isnan isinf isfinite logical_not bitwise_not
    positive frac sgn angle logit erfinv sinh cosh asin acos atan"""
_BINARY = """
    add sub subtract mul multiply div divide true_divide floor_divide pow remainder fmod maximum minimum where lerp
    addcmul addcdiv masked_fill eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    atan2 rsub xlogy hypot fmax fmin copysign"""
_OPERATORS = """
    __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __itruediv__
    __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __eq__ __ne__ __lt__ __le__ __gt__
    __ge__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __neg__ __abs__ __invert__ __pos__"""
_CONVERTING = """
    to float double half bfloat16 int long bool short type type_as contiguous clone detach requires_grad_ zeros_like
    ones_like empty_like full_like"""
_ALONG = "split chunk unbind softmax log_softmax topk sort argsort cumsum normalize tensor_split glu"
_REDUCING = """
    sum mean amax amin argmax argmin max min norm var std logsumexp prod all any count_nonzero median"""
_PAIR_LOSSES = """
    mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits"""


def _table() -> Mapping[Any, Handler]:
    handlers: dict[Any, Handler] = {}

    def put(names: str, handler: Handler, owners: Sequence[Any] = (torch, Tensor, F)) -> None:
        for name in names.split():
            for owner in owners:
                if callable(func := getattr(owner, name, None)):
                    handlers.setdefault(func, handler)

    put(_OPERATORS, tokens.elementwise, [Tensor])
    for name in (*_UNARY.split(), *_BINARY.split()):
        put(f"{name} {name}_", tokens.elementwise)
    put(_CONVERTING, tokens.converted)
    put("new_zeros new_ones new_empty new_full new_tensor", tokens.like_local)
    put("rand_like randn_like bernoulli bernoulli_ normal_ uniform_", tokens.drawn)
    put("transpose permute movedim moveaxis swapaxes swapdims unsqueeze t", shapes.permuted)
    put("squeeze", shapes.squeezed)
    put("view reshape", shapes.reshaped)
    put("flatten", shapes.flattened)
    put("unflatten", shapes.unflattened)
    put("expand", shapes.expanded, [Tensor])
    put("__getitem__", shapes.indexed, [Tensor])
    put("narrow", shapes.narrowed)
    put(_ALONG, shapes.along)
    put("cat concat concatenate", shapes.joined, [torch])
    put(_REDUCING, reductions.reduced)
    put("linear", tokens.linear, [F])
    put("matmul __matmul__", tokens.matmul)
    put("layer_norm rms_norm", tokens.normed)
    put("dropout", tokens.dropped, [F])
    put("embedding", tokens.embedded, [F])
    put("cross_entropy nll_loss", reductions.class_loss, [F])
    put(_PAIR_LOSSES, reductions.pair_loss, [F])
    for name in ("T", "mT", "H", "mH"):
        handlers[getattr(Tensor, name).__get__] = shapes.transposed
    return MappingProxyType(handlers)


HANDLERS: Mapping[Any, Handler] = _table()
