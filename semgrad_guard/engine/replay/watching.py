"""Whether values are the same objects, and tensors hold the same numbers: compared at every call, at little cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from typing import Any

import torch

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
