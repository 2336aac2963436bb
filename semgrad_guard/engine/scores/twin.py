"""The twin of a model: a copy that shares every weight. Hooks and substitutes touch it, never the user's model.

h^(l) is the input of decoder layer l. For the time of a block the twin lets layers' inputs be seen or replaced, hands
on below a layer, keeps the head's input in the place of the head's work, shows the outputs of linear maps, or answers
with outputs that are known. No pass depends on those before it: what one leaves in a module is taken back before the
next.

Why: docs/decisions.md#0001
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from semgrad_guard.engine.interruption import current_stop
from semgrad_guard.engine.scores.architecture import HOOKS, has_plain_weight, inspect_architecture, is_own
from semgrad_guard.engine.scores.head import input_gradient
from semgrad_guard.errors import UnsupportedModelError

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The name that the installed transformers gives a model's cache, in its arguments and its outputs."""

ATTENTION = "sdpa"
"""The library's own attention."""

Place = tuple[int, str]
"""A linear map by its decoder layer's number and its path in there."""

InputHook = Callable[[torch.Tensor], torch.Tensor | None]
"""Sees the input of a decoder layer [batch, positions, d]; its result replaces it."""


def _nothing(_: Place) -> None:
    """The outputs that are known of linear maps that are to be run."""


class Twin:
    """A copy of one model, in evaluation mode. Not re-entrant: callers hold the model's lock.

    Raises:
        UnsupportedModelError: the architecture rules a score out, or a copy would run the original's modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.architecture = inspect_architecture(model)
        self.model: Any = weight_sharing_copy(model)
        self.head = cast(nn.Linear, self.model.get_submodule(self.architecture.head))
        self.head.register_forward_pre_hook(_restride)
        path = self.architecture.layers
        members = [] if path is None else list(cast(nn.ModuleList, self.model.get_submodule(path)))
        self.places = [place for place in range(len(members)) if place not in self.architecture.idle]
        """The decoder layers' places in their list, and so in a cache."""
        self.layers = [members[place] for place in self.places]
        self._sees: Callable[[Place, torch.Tensor], None] | None = None
        self._knows: Callable[[Place], torch.Tensor | None] = _nothing
        self.settle()

    def settle(self) -> None:
        """Take the copy as it is now: its linear maps can be watched, and `reset` returns to this state."""
        for number, layer in enumerate(self.layers):
            for path, linear in layer.named_modules():
                if type(linear) is nn.Linear and has_plain_weight(linear) and "forward" not in vars(linear):
                    vars(linear)["forward"] = partial(self._linear, linear, (number, path))
        known = [getattr(module, "config", None) for layer in self.layers for module in layer.modules()]
        found = {id(config): config for config in known if getattr(config, "_attn_implementation", None) == ATTENTION}
        self.attention_configs = list(found.values())
        """The configurations by which modules of its layers take the library's own attention."""
        self._state = [_State(module) for module in self.model.modules()]

    @property
    def device(self) -> torch.device:
        """Where the head's weights, and so the token ids, live."""
        return self.head.weight.device

    def call(self, ids: torch.Tensor, *, cache: Cache | None = None, **inputs: Any) -> Any:
        """The model's output for token ids [B, n]; with a cache they stand behind its columns."""
        if not self.architecture.takes_positions:
            inputs.pop("position_ids", None)
        if not self.architecture.takes_logits_to_keep:
            inputs.pop("logits_to_keep", None)
        held = {"use_cache": False} if cache is None else {"use_cache": True, CACHE: cache}
        with stoppable([*self.layers, self.head]):
            return self.model(input_ids=ids, **{**held, **inputs})

    def step(self, ids: torch.Tensor, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Read `ids` [B, n], the columns behind those of `cache`, which grows by them: the head's output [B, V] then.

        `mask` [B, N] tells of all columns, the new ones included.
        """
        positions = (mask.cumsum(1) - 1).clamp_(min=0)[:, -ids.shape[1] :]
        output = self.call(ids, cache=cache, attention_mask=mask, position_ids=positions, logits_to_keep=1)
        return output.logits[:, -1]

    def generate(self, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
        """The library's own `generate`: no mode, hook or default of the user's model plays a part."""
        self.reset()
        with stoppable([*self.layers, self.head]):
            return self.model.generate(input_ids=ids, attention_mask=mask, **options)

    def reset(self) -> None:
        """Take back what earlier passes have left in modules: rotary frequencies of another length, for one."""
        for state in self._state:
            state.restore()

    @contextmanager
    def watching(self, table: Mapping[int, InputHook]) -> Iterator[None]:
        """For the time of a block, hooks on the inputs of some layers."""

        def see(watch: InputHook, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            changed = watch(cast(torch.Tensor, args[0] if args else kwargs["hidden_states"]))
            if changed is None:
                return None
            return ((changed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": changed})

        with ExitStack() as stack:
            for number, watch in table.items():
                hook = partial(see, watch)
                stack.callback(self.layers[number].register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    @contextmanager
    def headless(self) -> Iterator[list[torch.Tensor]]:
        """For the time of a block the head keeps its input in the list, and answers with zeros at no cost."""
        found: list[torch.Tensor] = []

        def keep(states: torch.Tensor) -> torch.Tensor:
            found.append(states)
            return states.new_zeros(*states.shape[:-1], 1)

        with replaced(self.head, keep):
            yield found

    @contextmanager
    def above(self, first: int) -> Iterator[None]:
        """For the time of a block the first `first` layers hand on their input."""
        with ExitStack() as stack:
            for layer in self.layers[:first]:
                stack.enter_context(replaced(layer, self.hands_on))
            yield

    @cached_property
    def hands_on(self) -> Callable[..., Any]:
        """A forward method that hands on its input in the form in which decoder layers answer."""
        seen: list[bool] = []
        hook = self.layers[0].register_forward_hook(lambda *call: seen.append(isinstance(call[2], tuple)))
        try:
            with torch.no_grad(), self.headless():
                token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
                # with its mask: without one, transformers warns of padding where the token is the padding's
                self.model(input_ids=token, attention_mask=torch.ones_like(token))
        finally:
            hook.remove()

        def hand_on(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            return (hidden_states,) if seen[0] else hidden_states

        return hand_on

    @contextmanager
    def with_maps(
        self,
        sees: Callable[[Place, torch.Tensor], None] | None = None,
        knows: Callable[[Place], torch.Tensor | None] = _nothing,
    ) -> Iterator[None]:
        """For the time of a block `sees` gets the output of every plain linear map in a layer.

        Where an output is known, and its shape agrees, the map answers with it, and its weight is not read.
        """
        before = self._sees, self._knows
        self._sees, self._knows = sees, knows
        try:
            yield
        finally:
            self._sees, self._knows = before

    @contextmanager
    def with_a_head_weight_of_its_own(self) -> Iterator[torch.Tensor]:
        """For the time of a block the head's weight takes part in graphs, and no other use of it (embeddings) does."""
        parameters = self.head._parameters
        shared = parameters["weight"]
        own = parameters["weight"] = nn.Parameter(cast(torch.Tensor, shared).detach(), requires_grad=True)
        try:
            yield own
        finally:
            parameters["weight"] = shared

    def _linear(self, linear: nn.Linear, place: Place, states: torch.Tensor) -> torch.Tensor:
        known = self._knows(place)
        if known is not None and known.shape[:-1] == states.shape[:-1]:
            output: Any = _Known.apply(states, linear.weight, known)
            return output
        given = F.linear(states, linear.weight, linear.bias)
        if self._sees is not None:
            self._sees(place, given)
        return given


@contextmanager
def replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """For the time of a block another forward method, of this one object."""
    before = {"forward": vars(module)["forward"]} if "forward" in vars(module) else {}
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        vars(module).update(before)


def _restride(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same states without the strides of the longer tensor they were sliced from.

    For a sliced 3-D input, `linear` on a CPU copies the whole weight (unless that requires a gradient).
    """
    states, *rest = args
    return (states.contiguous().view(-1, states.shape[-1]).view(states.shape), *rest)


class _Known(torch.autograd.Function):
    """The output of a linear map that is known, with the gradient that the product would have sent to its input."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return known.view_as(known)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        return input_gradient(rows, weight).view(*gradient.shape[:-1], -1), None, None


@contextmanager
def stoppable(modules: Iterable[nn.Module]) -> Iterator[None]:
    """For the time of a block the current stop is checked before each module, and before its part of a backward pass.

    Where no stop is set nothing is added, so that an ordinary run pays nothing.
    """
    stop = current_stop()
    stop.check()
    with ExitStack() as stack:
        for module in modules if stop else ():
            stack.callback(module.register_forward_pre_hook(_check, with_kwargs=True).remove)
        yield


def _check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    stop = current_stop()
    stop.check()
    states = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.Tensor)), None)
    if states is not None and states.requires_grad:
        states.register_hook(lambda _: stop.check())  # a backward pass may run in a thread without this context


class _State:
    """The plain attributes and the own buffers of one module, as they were when the twin was made."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(vars(module), dict(vars(module))), (module._buffers, dict(module._buffers))]
        small = [buffer for buffer in module._buffers.values() if buffer is not None and is_own(buffer)]
        self._own = [(buffer, buffer.clone(), buffer._version) for buffer in small]

    def restore(self) -> None:
        for table, first in self._tables:
            if len(table) != len(first):
                for name in [name for name in table.keys() - first.keys() if "hooks" not in name]:
                    del table[name]  # but what tells that the library's own hooks are there, which stay
            if list(map(id, table.values())) != list(map(id, first.values())):
                table.update(first)
        for number, (buffer, first, version) in enumerate(self._own):
            if buffer._version != version:
                buffer.copy_(first)
                self._own[number] = buffer, first, buffer._version


# Attributes by which a library's layer takes a kernel without autograd, as soon as a pass needs no gradient, and
# repacks its weights for it (bitsandbytes in four bits, on CPUs with bfloat16 units). A twin keeps to the other one.
_WITHOUT_AUTOGRAD = {"support_avx512bf16_for_cpu": False}


def weight_sharing_copy(model: nn.Module) -> nn.Module:
    """A deep copy in evaluation mode over the same weights: no parameter requires a gradient, backward hooks are gone.

    Forward hooks stay (a steered model is scored as it answers). Bound methods work on the copy's modules.

    Raises:
        UnsupportedModelError: it cannot be copied, or a plain function, or compiled code, would run the original.
    """
    modules = list(model.modules())
    _require_no_functions(modules)
    memo: dict[int, Any] = {id(parameter): _over_the_same_numbers(parameter) for parameter in model.parameters()}
    memo.update({id(buffer): buffer for buffer in model.buffers() if not is_own(buffer)})
    for module in modules:
        owners = [getattr(hook, "__self__", None) for name in HOOKS for hook in getattr(module, name).values()]
        memo.update({id(owner): owner for owner in owners if owner is not None and not isinstance(owner, nn.Module)})
    try:
        twin = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, AttributeError, RecursionError) as error:
        raise UnsupportedModelError(
            f"this {type(model).__name__} cannot be copied, and so not be scored without touching it: {error}. Remove "
            "the attribute or hook that holds what cannot be copied (a lock, a file, a tensor with a graph)."
        ) from error
    for module in twin.modules():  # all that a deep copy leaves to the original
        module._backward_hooks.clear()
        module._backward_pre_hooks.clear()
        state = vars(module)
        state.update({name: value for name, value in _WITHOUT_AUTOGRAD.items() if name in state})
        if "generation_config" in state:  # `generate` takes options that it is not given from there
            state["generation_config"] = GenerationConfig()
        if state.get("layers_are_rescaled") is False:
            config: Any = module.config
            if 0 < config.rescale_every < config.num_hidden_layers:  # RWKV; and the copy's weights are the user's
                raise UnsupportedModelError(
                    f"this {type(module).__name__} divides its weights in its first pass in evaluation mode, which is "
                    "its owner's to do. Run it once: model.eval(), then model(input_ids=...) under torch.no_grad()."
                )
            state["layers_are_rescaled"] = True  # they would be divided by one
    return twin.eval()


def _over_the_same_numbers(parameter: nn.Parameter) -> nn.Parameter:
    """Another object over the same storage: a library that gives a parameter new data in passing gives it to this."""
    attributes = dict(vars(parameter))
    if getattr(attributes.get("quant_state"), "packing_format_for_cpu", False):
        raise UnsupportedModelError(
            "bitsandbytes has repacked this model's weights for a CPU kernel that has no gradient, as it does in the "
            "first forward pass under torch.no_grad(). Load the model again, and let semgrad-guard generate and score "
            "with it before anything else runs it, or load it unquantized."
        )
    if type(parameter) is nn.Parameter or not issubclass(type(parameter), nn.Parameter):
        # (a tensor of a class of its own knows how to be detached)
        twin: Any = nn.Parameter(parameter.detach(), requires_grad=False)
    else:
        twin = torch.Tensor._make_subclass(type(parameter), parameter.detach().as_subclass(torch.Tensor), False)
    for name, value in attributes.items():
        vars(twin).setdefault(name, value)
    return twin


def _require_no_functions(modules: Sequence[nn.Module]) -> None:
    """Refuse compiled code, and functions that replace a method of one module: they would run that very module."""
    for module in modules:
        if "_orig_mod" in module._modules:
            raise UnsupportedModelError(
                "a module of this model is compiled, and compiled code runs the module that it was made of, not the "
                "copy that is scored. Give the model as it was before torch.compile (its _orig_mod)."
            )
        for name, value in vars(module).items():
            if isinstance(value, FunctionType) and callable(getattr(type(module), name, None)):
                kind = type(module).__name__
                raise UnsupportedModelError(
                    f"{kind}.{name} was replaced on one object by the function {value.__qualname__}, which would run "
                    f"that very {kind} and not the copy that is scored. Bind the function to the module, "
                    f"module.{name} = types.MethodType(function, module), or use a forward hook, or load the model "
                    "again."
                )
