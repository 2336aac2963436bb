"""What an owner may do to a model between two scores, and the results of plain autograd for the model as it then is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from .cases import Case
from .oracle import official_span

Switch = Callable[[Any], Any]


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


def top(model: Any) -> None:
    """Logits that are scaled by a method of the whole model's own."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = type(self).forward(self, *args, **kwargs)
        output.logits = output.logits * 0.6
        return output

    model.forward = MethodType(forward, model)


def with_data(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    """An edit without a gradient."""

    def edit(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            change(tensor)

    return edit


def activation(function: Callable[[Any], Any]) -> Switch:
    """A function in the place of a module."""

    def put(model: Any) -> None:
        del model.model.layers[3].mlp.act_fn
        model.model.layers[3].mlp.act_fn = function

    return put


def other_layer(model: Any) -> None:
    """Two layers exchanged."""
    model.model.layers[3], model.model.layers[1] = model.model.layers[1], model.model.layers[3]


def fewer_layers(model: Any) -> None:
    """Layers dropped."""
    model.model.layers = nn.ModuleList([*model.model.layers][:3])
    model.config.num_hidden_layers = 3


def another_head(model: Any) -> None:
    """A head of other weights."""
    head = nn.Linear(32, model.lm_head.weight.shape[0], bias=False).double()
    head.weight.data = torch.roll(model.lm_head.weight.data, 1, 0)
    model.lm_head = head


def another_class(model: Any) -> None:
    """A module that is of another class from now on."""

    class Louder(type(model.model.layers[3].mlp)):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 1.5

    model.model.layers[3].mlp.__class__ = Louder


def hooked(model: Any, factor: float = 1.4) -> Any:
    """A steering hook."""
    return model.model.layers[3].register_forward_hook(lambda _, __, output: output * factor)


NOTICED: Mapping[str, Switch] = {
    "activation": lambda m: setattr(m.model.layers[3].mlp, "act_fn", nn.Tanh()),
    "activation by a function": activation(torch.tanh),
    "weights in place": lambda m: with_data(lambda w: w.mul_(1.2))(m.model.layers[3].mlp.up_proj.weight),
    "weights through .data": lambda m: m.model.layers[3].mlp.up_proj.weight.data.mul_(1.2),
    "a parameter replaced": lambda m: setattr(m.model.norm, "weight", nn.Parameter(m.model.norm.weight * 1.3)),
    "data of other numbers": lambda m: setattr(m.model.norm.weight, "data", m.model.norm.weight.data * 1.3),
    "layers exchanged": other_layer,
    "layers dropped": fewer_layers,
    "another head": another_head,
    "another class": another_class,
    "forward of an mlp": lambda m: scaled(1.4)(m.model.layers[3].mlp),
    "forward of a lower layer": lambda m: scaled(1.4)(m.model.layers[1]),
    "forward of the embedding": lambda m: scaled(1.4)(m.model.embed_tokens),
    "forward of the head": lambda m: scaled(1.4)(m.lm_head),
    "forward of the whole": top,
    "a hook": hooked,
    "a pre-hook": lambda m: m.model.layers[3].mlp.register_forward_pre_hook(lambda _, args: (args[0] * 1.4,)),
    "a hook on the head": lambda m: m.lm_head.register_forward_hook(lambda _, __, output: output * 1.4),
}
"""On a Llama of five layers: seen at the next score, by nobody's word."""

TOLD: Mapping[str, Switch] = {
    "scaling": lambda m: setattr(m.model.layers[3].self_attn, "scaling", 0.9),
    "norm's epsilon": lambda m: setattr(m.model.norm, "variance_epsilon", 0.5),
    "frequencies in place": lambda m: with_data(lambda b: b.mul_(1.7))(m.model.rotary_emb.inv_freq),
    "frequencies replaced": lambda m: setattr(m.model.rotary_emb, "inv_freq", m.model.rotary_emb.inv_freq * 1.7),
}
"""Seen at the next `refresh`."""

REFUSED: Mapping[str, Switch] = {
    "forward by a closure": lambda m: closed_over(m.model.layers[3].mlp),
    "forward of the whole by a function": closed_over,
    "a compiled method": lambda m: setattr(
        m.model.layers[2].mlp, "forward", torch.compile(m.model.layers[2].mlp.forward, backend="eager")
    ),
}
"""Functions that would run the user's modules in the place of the copy's."""

INERT: Mapping[str, Switch] = {
    "training": lambda m: m.train(),
    "frozen": lambda m: m.requires_grad_(False),
    "checkpointing": lambda m: m.gradient_checkpointing_enable(),
    "gradients by the input": lambda m: m.enable_input_require_grads(),
    "another cache": lambda m: setattr(m.config, "use_cache", False),
    "another kind of attention": lambda m: m.set_attn_implementation("eager"),
    "hidden states asked for": lambda m: m(input_ids=torch.tensor([[1, 2, 3]]), output_hidden_states=True),
    "an answer": lambda m: m.generate(input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=2, pad_token_id=0),
    "compiled": lambda m: m.compile(backend="eager"),
}
"""No number changes."""
