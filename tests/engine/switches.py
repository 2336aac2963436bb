"""What an owner may do to a model between two scores, and the results of plain autograd for the model as it then is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from .oracle import official_span
from .cases import Case

Switch = Callable[[Any], Any]

SETTINGS = {"factor": 1.0}
FACTOR = 1.0
FIRST_FORWARD: Any = None


def plain_scores(model: Any, case: Case) -> tuple[float, float]:
    """SemGrad and ParaGrad by one ordinary call of the model itself, whatever has been done to it, and autograd."""
    head = model.get_output_embeddings()
    was_training, wanted = model.training, [p.requires_grad for p in model.parameters()]
    model.eval().requires_grad_(False)
    head.weight.requires_grad_(True)
    try:
        with torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            ids = torch.tensor([[*case.prompt, *case.response]])
            states = []
            inner = model.get_input_embeddings()
            handle = inner.register_forward_hook(lambda _, __, output: output.detach().requires_grad_())
            try:
                output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
            finally:
                handle.remove()
            first = output.logits.shape[1] - len(case.response) - 1
            log_p = output.logits[0, first : first + len(case.response)].double().log_softmax(-1)
            entropies = -(log_p.detach().exp() * log_p.detach()).sum(-1)
            chosen = log_p[torch.arange(len(case.response)), torch.tensor(case.response)]
            states = output.hidden_states[:-1]
            paragrad, *gradients = torch.autograd.grad((entropies * chosen).sum(), [head.weight, *states])
    finally:
        model.train(was_training)
        for parameter, flag in zip(model.parameters(), wanted, strict=True):
            parameter.requires_grad_(flag)
    at = -len(case.response) + case.semantic_token
    span = official_span(len(states), "paper")
    semgrad = torch.stack([gradients[layer][0, at] for layer in span]).abs().mean()
    return float(semgrad), float(paragrad.abs().mean())


# What is done to a module.


def scaled(factor: float) -> Callable[..., Any]:
    """A forward that gives its module's own output times a factor, bound to the module."""

    def patch(module: Any) -> None:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = type(self).forward(self, *args, **kwargs)
            return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

        module.forward = MethodType(forward, module)

    return patch


def closed_over(module: Any) -> None:
    """As in many notebooks: a function in the forward's place, with the old method in its closure."""
    before = module.forward
    module.forward = lambda *args, **kwargs: before(*args, **kwargs) * 1.4


def bound_method(module: Any) -> None:
    kind = type(module)
    module.forward = MethodType(
        lambda self, *a, **k: kind.forward(self, *a, **k) * self.gate_proj.weight.mean(), module
    )


def bound_partial(module: Any) -> None:
    module._old_forward = module.forward

    def forward(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return owner._old_forward(*args, **kwargs) * 0.7

    module.forward = partial(forward, module)


class Controller:
    """An object of the user's in a forward's place."""

    def __init__(self, module: nn.Module, factor: float) -> None:
        self.module, self.before, self.factor = module, module.forward, factor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.before(*args, **kwargs) * self.factor + self.module.down_proj.weight.mean()


def top(model: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = type(self).forward(self, *args, **kwargs)
        output.logits = output.logits * 0.6
        return output

    model.forward = MethodType(forward, model)


def top_by_global(model: Any) -> None:
    """As in a script: the old method is a global variable."""
    global FIRST_FORWARD
    FIRST_FORWARD = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = FIRST_FORWARD(*args, **kwargs)
        output.logits = output.logits * 0.6
        return output

    model.forward = forward


class Doubled(nn.Module):
    """A wrapper with a setting of its own."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * self.factor


def wrapped(model: Any) -> Switch:
    model.model.layers[3].mlp = Doubled(model.model.layers[3].mlp, 1.0)
    return lambda model: setattr(model.model.layers[3].mlp, "factor", 1.6)


def hooked(name: str) -> Callable[[Any], Switch]:
    """A steering hook whose strength lies somewhere else."""

    def prepare(model: Any) -> Switch:
        layer, state = model.model.layers[3], SimpleNamespace(factor=1.0)
        if name == "closure":
            layer.register_forward_hook(lambda _, __, output: output * state.factor)
            return lambda _: setattr(state, "factor", 1.4)
        if name == "dictionary":
            SETTINGS["factor"] = 1.0
            layer.register_forward_hook(lambda _, __, output: output * SETTINGS["factor"])
            return lambda _: SETTINGS.update(factor=1.4)

        def set_global(_: Any) -> None:
            global FACTOR
            FACTOR = 1.4

        globals()["FACTOR"] = 1.0
        layer.register_forward_hook(lambda _, __, output: output * FACTOR)
        return set_global

    return prepare


def method_of_class(model: Any) -> Switch:
    class Gentle(type(model.model.layers[3].mlp)):
        def forward(self, x: Any) -> Any:
            return super().forward(x)

    def louder(self: Any, x: Any) -> Any:
        return super(Gentle, self).forward(x) * 1.5

    model.model.layers[3].mlp.__class__ = Gentle
    return lambda _: setattr(Gentle, "forward", louder)


def with_data(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    def edit(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            change(tensor)

    return edit


def activation(function: Callable[[Any], Any]) -> Switch:
    def put(model: Any) -> None:
        del model.model.layers[3].mlp.act_fn
        model.model.layers[3].mlp.act_fn = function

    return put


def other_layer(model: Any) -> None:
    model.model.layers[3], model.model.layers[1] = model.model.layers[1], model.model.layers[3]


def fewer_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList([*model.model.layers][:3])
    model.config.num_hidden_layers = 3


def another_head(model: Any) -> None:
    head = nn.Linear(32, model.lm_head.weight.shape[0], bias=False).double()
    head.weight.data = torch.roll(model.lm_head.weight.data, 1, 0)
    model.lm_head = head


def hooked_with_the_model(model: Any) -> None:
    """The hook runs a module of the model itself, by its closure."""
    model.model.layers[3].register_forward_hook(lambda _, __, output: output + model.model.norm(output))


def hooked_with_a_global_module(model: Any) -> None:
    global FIRST_FORWARD
    FIRST_FORWARD = model.model.layers[2].mlp.forward
    model.model.layers[3].mlp.register_forward_hook(lambda _, __, output: output + FIRST_FORWARD(output))


def compiled_closure(model: Any) -> None:
    closed_over(model.model.layers[2].mlp)
    model.model.layers[2].mlp.forward = torch.compile(model.model.layers[2].mlp.forward, backend="eager")


def compiled_layer(model: Any) -> None:
    scaled(1.3)(model.model.layers[2].mlp)
    model.model.layers[2] = torch.compile(model.model.layers[2], backend="eager")


def compiled_forward(model: Any) -> None:
    scaled(1.3)(model.model.layers[2].mlp)
    model.model.layers[2].mlp.forward = torch.compile(model.model.layers[2].mlp.forward, backend="eager")


def compiled_model(model: Any) -> None:
    scaled(1.3)(model.model.layers[2].mlp)
    model.compile(backend="eager")


def held_elsewhere(model: Any) -> None:
    """The layer runs a module that is no child of anything."""
    extra = nn.Linear(32, 32, bias=False).double()
    model.model.layers[3].register_forward_hook(lambda _, __, output: output + extra(output))


def edit_buffer(change: Callable[[torch.Tensor], Any]) -> Switch:
    return lambda model: with_data(change)(model.model.rotary_emb.inv_freq)


SWITCHES: Mapping[str, Switch] = {
    "activation": lambda m: setattr(m.model.layers[3].mlp, "act_fn", nn.Tanh()),
    "activation by a function": activation(torch.tanh),
    "activation by a lambda": activation(lambda x: x * 0.1),
    "scaling": lambda m: setattr(m.model.layers[3].self_attn, "scaling", 0.9),
    "norm's epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "frequencies in place": edit_buffer(lambda b: b.mul_(1.7)),
    "frequencies through .data": edit_buffer(lambda b: b.data.mul_(1.7)),
    "frequencies replaced": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 1.7),
    "weights in place": lambda m: with_data(lambda w: w.mul_(1.2))(m.model.layers[3].mlp.up_proj.weight),
    "weights through .data": lambda m: m.model.layers[3].mlp.up_proj.weight.data.mul_(1.2),
    "weights transposed": lambda m: setattr(
        m.model.layers[3].self_attn.q_proj.weight, "data", m.model.layers[3].self_attn.q_proj.weight.data.t()
    ),
    "a parameter replaced": lambda m: setattr(m.model.norm, "weight", nn.Parameter(m.model.norm.weight * 1.3)),
    "layers exchanged": other_layer,
    "layers dropped": fewer_layers,
    "another head": another_head,
    "forward of an mlp": lambda m: scaled(1.4)(m.model.layers[3].mlp),
    "forward of a lower mlp": lambda m: scaled(1.4)(m.model.layers[0].mlp),
    "forward of a norm": lambda m: scaled(1.4)(m.model.norm),
    "forward of a linear map": lambda m: scaled(1.4)(m.model.layers[3].mlp.down_proj),
    "forward of attention": lambda m: scaled(1.4)(m.model.layers[3].self_attn),
    "forward of a layer": lambda m: scaled(1.4)(m.model.layers[3]),
    "forward of a lower layer": lambda m: scaled(1.4)(m.model.layers[1]),
    "forward of the embedding": lambda m: scaled(1.4)(m.model.embed_tokens),
    "forward of the head": lambda m: scaled(1.4)(m.lm_head),
    "forward by a bound method": lambda m: bound_method(m.model.layers[3].mlp),
    "forward by a partial": lambda m: bound_partial(m.model.layers[3].mlp),
    "forward by an object": lambda m: setattr(m.model.layers[3].mlp, "forward", Controller(m.model.layers[3].mlp, 0.8)),
    "forward of the whole": top,
    "a hook": lambda m: m.model.layers[3].register_forward_hook(lambda _, __, output: output * 1.4),
    "a pre-hook": lambda m: m.model.layers[3].mlp.register_forward_pre_hook(lambda _, args: (args[0] * 1.4,)),
    "a hook on the head": lambda m: m.lm_head.register_forward_hook(lambda _, __, output: output * 1.4),
    "a hook with a module of its own": held_elsewhere,
    "a compiled layer": compiled_layer,
    "a compiled forward": compiled_forward,
    "a compiled model": compiled_model,
    "another kind of attention": lambda m: m.set_attn_implementation("eager"),
}
"""On a Llama of five layers."""

PREPARED: Mapping[str, Callable[[Any], Switch]] = {
    "a wrapper's attribute": wrapped,
    "a class's method": method_of_class,
    "a hook's closure": hooked("closure"),
    "a hook's dictionary": hooked("dictionary"),
    "a hook's global": hooked("global"),
}
"""Made ready before the first score: each returns what is then done."""

REFUSED: Mapping[str, tuple[Switch, str]] = {
    "forward by a closure": (lambda m: closed_over(m.model.layers[3].mlp), "replaced on one object"),
    "forward of the whole, by a global": (top_by_global, "replaced on one object"),
    "a compiled closure": (compiled_closure, "replaced on one object"),
    "a hook that runs the model": (hooked_with_the_model, "model's own modules"),
    "a hook that runs a global": (hooked_with_a_global_module, "model's own modules"),
    "a method that runs the model": (
        lambda m: setattr(
            m.model.layers[3].mlp,
            "forward",
            MethodType(lambda self, x: m.model.layers[1].mlp(x), m.model.layers[3].mlp),
        ),
        "model's own modules",
    ),
}
"""Code that would run the user's modules in the place of the copy's, and the words of the refusal."""


def runs_own_code(name: str) -> bool:
    """Whether a switch brings code whose variables cannot be compared."""
    return name.startswith(("forward", "a hook", "a pre-hook", "a compiled", "a class's", "activation by a lambda"))
