"""A loop inside a program: an XLA While whose number of iterations is a value, around a body of torch operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
from torch_xla.core import xla_builder

from isthmus_tpu.online_softmax import Body, Tensors

Kind = tuple[torch.Size, torch.dtype]
SCALAR: Kind = (torch.Size(()), torch.int32)


@dataclass(frozen=True, slots=True)
class TracedBody:
    """computation: of torch_xla.  used: which of (iteration, *carry, *constants, *hoisted) it takes, in its order.

    hoisted: tensors that the body makes of nothing, such as ranges and factors, always the same.
    """

    computation: Any
    used: tuple[int, ...]
    hoisted: Tensors


@dataclass(frozen=True, slots=True)
class CompiledLoop:
    """`(iteration, count, *carry, *constants, *hoisted)` to the same, with iteration = count."""

    computation: Any
    hoisted: Tensors


class XlaLoop:
    """A `Loop` for lazy tensors, of one body.

    The body is traced once for each set of shapes; a step then adds one operation to its program, however often the
    body runs. torch_xla's own `while_loop` traces anew each time, with tensors as large as the cache.
    """

    def __init__(self) -> None:
        self._loops: dict[tuple[tuple[Kind, ...], tuple[Kind, ...]], CompiledLoop] = {}

    def __call__(self, count: torch.Tensor, body: Body, carry: Tensors, constants: Tensors) -> Tensors:
        key = (_kinds(carry), _kinds(constants))
        if key not in self._loops:
            self._loops[key] = _while(*key, body)
        loop = self._loops[key]
        iteration = torch.zeros((), dtype=torch.int32, device=count.device)
        inputs = (iteration, count[0], *carry, *constants, *loop.hoisted)
        results = torch_xla._XLAC._xla_user_computation("isthmus::loop", inputs, loop.computation)
        return tuple(results[2 : 2 + len(carry)])


def _kinds(tensors: Tensors) -> tuple[Kind, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def _while(carry: tuple[Kind, ...], constants: tuple[Kind, ...], body: Body) -> CompiledLoop:
    traced = _trace(carry, constants, body)

    def condition(iteration: Any, count: Any, *_: Any) -> Any:
        return iteration < count

    def step(iteration: Any, count: Any, *rest: Any) -> tuple[Any, ...]:
        arguments = (iteration, *rest)
        result = xla_builder.Op.call(traced.computation, [arguments[place] for place in traced.used])
        updated = [result.get_tuple_element(place) for place in range(len(carry))]
        one = xla_builder.Op.scalar(iteration.builder(), 1, dtype=xla_builder.Type.S32)
        return (iteration + one, count, *updated, *rest[len(carry) :])

    builder = xla_builder.create_builder("isthmus_loop")
    kinds = (SCALAR, SCALAR, *carry, *constants, *_kinds(traced.hoisted))
    parameters = [
        xla_builder.mkparam(builder, place, xla_builder.tensor_shape(_placeholder(kind)))
        for place, kind in enumerate(kinds)
    ]
    computation = xla_builder.Op.mkwhile(tuple(parameters), condition, step).build("isthmus_loop")
    return CompiledLoop(computation, traced.hoisted)


def _trace(carry: tuple[Kind, ...], constants: tuple[Kind, ...], body: Body) -> TracedBody:
    arguments = [_placeholder(kind) for kind in (SCALAR, *carry, *constants)]
    iteration, *rest = arguments
    results = tuple(body(iteration, tuple(rest[: len(carry)]), tuple(rest[len(carry) :])))
    if _kinds(results) != carry:
        raise TypeError(f"the body of a loop takes {carry} and gives {_kinds(results)}; they must be equal")
    lowering = torch_xla._XLAC.lowering.LoweringContext("isthmus_body")
    lowering.build(list(results))
    computation = xla_builder.computation_from_module_proto("isthmus_body", lowering.hlo())
    numbers = {lowering.tensor_parameter_id(argument): place for place, argument in enumerate(arguments)}
    numbers.pop(-1, None)  # arguments that the body does not use
    hoisted: list[torch.Tensor] = []
    for number, tensor in lowering.device_parameter_id_tensor_mapping().items():
        if number not in numbers:
            numbers[number] = len(arguments) + len(hoisted)
            hoisted.append(tensor.to(torch_xla.device()))
    return TracedBody(computation, tuple(numbers[number] for number in sorted(numbers)), tuple(hoisted))


def _placeholder(kind: Kind) -> torch.Tensor:
    """A tensor without memory."""
    return xla_builder.create_placeholder_tensor(*kind)
