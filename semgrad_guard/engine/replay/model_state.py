"""All that a model is made of at one moment, so that a change by its owner is seen at the next call.

A model's behaviour is its modules' attributes: weights and buffers, children, hooks, replaced methods, flags, settings,
and the code of its modules' classes. A snapshot notes all of them. Comparing takes one walk over the same dictionaries,
without Python code for each entry; only where something differs is the model read anew and compared as a whole.
Variables that functions read are not followed: `own_code` says in words where a change could therefore stay unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from semgrad_guard.engine.replay.model_copies import is_own_buffer
from semgrad_guard.engine.replay.own_code import (
    ATOMS,
    HOOKS,
    Code,
    innermost,
    is_container,
    is_holder,
    is_inert,
    is_of_program,
    is_replaced,
    slots_of,
)

_TABLES = ("_parameters", "_buffers", "_modules")
NO_MATTER = frozenset(
    {
        "training",  # every pass is in evaluation mode
        "_compiled_call_impl",  # computes the same as its original
        "_output_capturing_hooks_installed",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_is_full_backward_hook",
        "_non_persistent_buffers_set",
        *(name for name in vars(nn.Module()) if "state_dict" in name),
        *chain.from_iterable(HOOKS.values()),
    }
)
_BY_VALUE = ATOMS | {MethodType}


class Snapshot:
    """A model's parts at one moment. It holds them, so that no other object can take their place unnoticed."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._model_id = weakref.ref(model), id(model)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self.holds_the_model = False
        """Whether the model is reached from its own parts: then it lives as long as this snapshot."""
        self.own_code: str | None = None
        """The first piece of code, in words, that is not a method of a module's class: it may look at anything."""
        self._leaves: list[Any] = []
        self._seen: set[int] = set()
        self._modules: list[nn.Module] = []
        self._chosen: list[tuple[Mapping[str, Any], list[str]]] = []  # of modules and their classes, by name
        self._tables: list[Mapping[Any, Any]] = []  # tables, containers and objects as a whole
        self._named: list[Mapping[Any, Any]] = []  # those of them whose keys may change while their values do not
        self._sequences: list[Iterable[Any]] = []
        self._tensors: list[torch.Tensor] = []
        self._visit_module(model)
        for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
            self._visit_table(hooks)
            self._note("hooks on all modules" if hooks else None)
        self.code = Code(self._all_modules())
        for table, names in self.code.chosen():
            self._chosen.append((table, names))
            self._leaves += [len(names), *(table[name] for name in names)]
        for place, value in self.code.settings():
            self._visit(value, place)
        self._entries = Entries(self._chosen, self._tables, self._named)
        self._items = [list(sequence) for sequence in self._sequences]
        self._classes = list(map(type, self._all_modules()))
        self._plain = [tensor for tensor in self._tensors if has_storage(tensor)]
        self._layouts = layouts_of(self._plain)
        named = ((module, *item) for module in self._all_modules() for item in module._buffers.items())
        own = [buffer for module, name, buffer in named if buffer is not None and is_own_buffer(module, name, buffer)]
        self._buffers = Contents(own, whole=True)
        self._leaves += self._buffers.as_bytes()
        self.weights = Contents(self._plain)

    @property
    def tensors(self) -> frozenset[int]:
        """The numbers of all tensors that it holds."""
        return frozenset(map(id, self._tensors))

    def is_current(self) -> bool:
        """Whether the model is still the same, its shared weights' numbers aside (see `weights`)."""
        return (
            self._entries.are_the_same()
            and list(map(type, self._all_modules())) == self._classes
            and layouts_of(self._plain) == self._layouts
            and all(_same(list(s), items) for s, items in zip(self._sequences, self._items, strict=True))
            and not self._buffers.have_changed()
        )

    def agrees_with(self, other: Snapshot) -> bool:
        """Whether both describe the same model, down to every attribute that can matter."""
        return _same(self._leaves, other._leaves)

    # The walk.

    def _visit(self, value: Any, path: str = "") -> None:
        value = innermost(value)
        self._leaves.append(type(value) if is_container(value) else value)
        if type(value) in ATOMS:
            return
        if id(value) == self._model_id:
            self.holds_the_model = True
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._visit_module(value)
        elif isinstance(value, torch.Tensor):
            self._tensors.append(value)
            self._leaves += layout_of(value)
            if vars(value):
                self._visit_table(vars(value))
        elif is_container(value):
            self._visit_container(value, path)
        elif is_holder(value):
            self._visit_holder(value, path)
        else:
            self._visit_function(value, path)

    def _visit_function(self, value: Any, path: str) -> None:
        if isinstance(value, FunctionType) and is_of_program(value):
            self._note(f"{path} is the function {value.__qualname__}")
        elif isinstance(value, MethodType):
            self._visit(value.__func__, path)
            self._visit(value.__self__, path)
        elif isinstance(value, partial):
            for part in (value.func, *value.args, *value.keywords.values(), vars(value)):
                self._visit(part, path)

    def _note(self, own_code: str | None) -> None:
        self.own_code = self.own_code or own_code

    def _visit_module(self, module: nn.Module) -> None:
        self._seen.add(id(module))
        if id(module) != self._model_id:
            self._modules.append(module)
        path = self._paths.get(id(module)) or type(module).__name__
        self._leaves.append(type(module))
        self._chosen.append((vars(module), [name for name in vars(module) if name not in NO_MATTER]))
        for name, value in list(vars(module).items()):
            if name in _TABLES:
                self._visit_table(value)
            elif name in HOOKS:
                self._tables.append(value)
                flags = [getattr(module, table) for table in HOOKS[name]]
                for number, hook in value.items():
                    if not is_inert(hook):
                        self._note(f"{path} has a forward hook")
                        self._leaves += [hook, *(number in table for table in flags)]
            elif name not in NO_MATTER:
                self._leaves.append(name)
                self._note(f"{path}.{name} was replaced on this object" if is_replaced(module, name, value) else None)
                self._visit(value, f"{path}.{name}")

    def _visit_table(self, table: Mapping[Any, Any], path: str = "") -> None:
        self._tables.append(table)
        self._named.append(table)
        self._leaves += [len(table), *table]
        for value in list(table.values()):
            self._visit(value, path)

    def _visit_container(self, container: Any, path: str) -> None:
        if isinstance(container, dict):
            self._visit_table(container, path)
            return
        if not isinstance(container, tuple):
            self._sequences.append(container)
        self._leaves.append(len(container))
        for value in list(container):
            self._visit(value, path)

    def _visit_holder(self, holder: Any, path: str) -> None:
        if hasattr(holder, "__dict__"):
            self._visit_table(vars(holder), path)
        if slots := _Slots(holder):
            self._sequences.append(slots)
            for value in slots:
                self._visit(value, path)

    # The comparison.

    def _all_modules(self) -> list[nn.Module]:
        """All modules, the model itself first as long as it lives: a snapshot does not keep it."""
        model = self._model()
        return [*([] if model is None else [model]), *self._modules]


class _Slots:
    """The values of an object that its class keeps outside a dictionary, read anew each time."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder
        self._names = slots_of(type(holder))

    def __bool__(self) -> bool:
        return bool(self._names)

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self._holder, name, None) for name in self._names)


def _same(one: Sequence[Any], two: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects; numbers, texts and methods count by value."""
    if len(one) != len(two):
        return False
    pairs = zip(one, two, strict=True)
    return all(a is b or (type(a) is type(b) and type(a) in _BY_VALUE and bool(a == b)) for a, b in pairs)


_WHOLE = 4096  # bytes of a tensor up to which all of it is compared,
_SAMPLE = 64  # and how many of a larger one
_END = object()
_pointer, _stride, _shape = torch.Tensor.data_ptr, torch.Tensor.stride, attrgetter("shape")
_version = attrgetter("_version")


class Entries:
    """The entries of many dictionaries, compared by identity without Python code for each of them.

    Of `chosen` dictionaries only the named entries count, and that there are no others: an unused entry costs
    nothing. Of the other `tables` all values are compared, and of those in `named` the keys.
    """

    def __init__(
        self,
        chosen: Iterable[tuple[Mapping[str, Any], Sequence[str]]],
        tables: Iterable[Mapping[Any, Any]],
        named: Iterable[Mapping[Any, Any]],
    ) -> None:
        pairs = [(table, names) for table, names in chosen if names]
        self._chosen = [table for table, _ in pairs]
        self._getters = [itemgetter(*names, names[0]) for _, names in pairs]  # of two names or more it makes a tuple
        self._lengths = list(map(len, self._chosen))
        self._empty = [table for table in tables if not table]
        self._values = [table.values() for table in tables if table]
        self._keys = [table for table in named if table]
        self._known = list(self._all())

    def are_the_same(self) -> bool:
        """Whether every entry is the object that it was."""
        try:
            return (
                list(map(len, self._chosen)) == self._lengths
                and not any(self._empty)
                and all(map(is_, self._all(), self._known))
            )
        except KeyError:  # an attribute is gone
            return False

    def _all(self) -> Iterable[Any]:
        get: Any = call
        chosen = chain.from_iterable(map(get, self._getters, self._chosen))
        return chain(chosen, chain.from_iterable(self._values), chain.from_iterable(self._keys), (_END,))


class Contents:
    """The numbers in some tensors: whether they were edited in place since they were last compared.

    An edit shows in torch's own count of them, and, for those that it does not count (through `.data`), by the bytes:
    all of a small tensor, some of a large one, which an edit of the whole tensor changes too.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, whole: bool = False) -> None:
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        pieces = [piece for tensor in tensors if (piece := _bytes_of(tensor, whole=whole)) is not None]
        self._pieces = [[p for p in pieces if p.device == device] for device in dict.fromkeys(p.device for p in pieces)]
        self._versions, self._samples = self._read()

    def have_changed(self) -> bool:
        """Whether they were edited since; `update` takes note of it."""
        versions, samples = self._read()
        return versions != self._versions or not all(map(torch.equal, samples, self._samples))

    def update(self) -> None:
        """Take them as they are now."""
        self._versions, self._samples = self._read()

    def as_bytes(self) -> list[bytes]:
        """The bytes that are compared."""
        return [sample.cpu().numpy().tobytes() for sample in self._samples]

    def _read(self) -> tuple[list[int], list[torch.Tensor]]:
        with torch.no_grad(), _plainly():
            return list(map(_version, self._tensors)), [torch.cat(pieces) for pieces in self._pieces]


def _bytes_of(tensor: torch.Tensor, *, whole: bool) -> torch.Tensor | None:
    """A view of some of a tensor's bytes [n]; None where it has none that can be viewed."""
    if not has_storage(tensor) or not tensor.is_contiguous() or not tensor.numel():
        return None
    flat = tensor.as_subclass(torch.Tensor).detach().view(-1)
    if not whole and flat.nbytes > _WHOLE:
        count, middle = max(1, _SAMPLE // flat.itemsize), len(flat) // 2
        flat = flat[middle : middle + count]
    return flat.view(torch.uint8)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether the numbers lie in memory of the tensor's own (not so for wrappers of other tensors)."""
    if tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "__tensor_flatten__"):
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def layouts_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Where the numbers of tensors lie."""
    with _plainly():
        return [*map(_pointer, tensors), *map(_shape, tensors), *map(_stride, tensors)]


def layout_of(tensor: torch.Tensor) -> list[Any]:
    """One tensor's, as values that can be compared one by one."""
    if not has_storage(tensor):
        return []
    pointer, shape, stride = layouts_of([tensor])
    return [pointer, tensor.dtype, shape, torch.Size(stride)]


def _plainly() -> Any:
    """For the time of a block, tensors of libraries' classes are read as plain ones, which takes no Python code."""
    return torch._C.DisableTorchFunctionSubclass()


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
