"""An export map: the names, types and layout of a trainer's tensors made into those that an engine loads."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.ir.errors import WeightsError
from stretto.weights.manifest import ITEM_BYTES, TensorSpec
from stretto.weights.sources.shard import Shard, Source, confirm, identity_of
from stretto.weights.sources.tensors import as_source

Rename = Mapping[str, str | None] | Sequence[tuple[str, str | None]] | Callable[[str], str | None]
BLOCK = 128
"""Rows and columns of a weight that share a scale."""
_LARGEST = 448.0  # of float8_e4m3fn
_FLOATS = {"float16", "bfloat16", "float32", "float64"}


@dataclass(frozen=True)
class Export:
    """What to change, in this order; every step sees the names that the one before it has made.

    1. `rename`: {name: new name}, [(regular expression, replacement), …] applied in turn anywhere in a name, or a
       function of the name. A tensor whose new name is None is left out.
    2. `unstack`: {glob: template}. A tensor [experts, …] becomes one per expert, named by the template: `{expert}` is
       its number, `{0}`, `{1}`, … are what the glob's `*` and `?` stand for.
    3. `stack`: {regular expression: template}, the reverse. The expression matches a whole name and has a group called
       `expert`; `{0}`, `{1}`, … are its other groups. Ranks that have only some of the experts must be told how many
       there are: {regular expression: (template, experts)}.
    4. `fp8`: globs of matrices to be quantised to float8_e4m3fn in blocks of 128 × 128, from the values that are there
       before `dtype`. NAME is then accompanied by NAME_scale_inv, in float32, by which a block is to be multiplied.
    5. `dtype`: for all other tensors of 16 to 64-bit floating point, or {glob: dtype}, of which the first that matches
       counts.

    >>> export = Export(rename=[(r"^module\\.", "")], unstack={"*.experts.up": "{0}.experts.{expert}.up"})
    >>> [part.entry.name for part in export({"module.mlp.experts.up": torch.zeros(2, 4, 4)}).held()]
    ['mlp.experts.0.up', 'mlp.experts.1.up']
    """

    rename: Rename = ()
    unstack: Mapping[str, str] = field(default_factory=dict)
    stack: Mapping[str, str | tuple[str, int]] = field(default_factory=dict)
    fp8: Sequence[str] = ()
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None

    def __post_init__(self) -> None:
        for template in self.unstack.values():
            if "{expert}" not in template:
                raise WeightsError(f"{template!r:.80} names all experts alike; put {{expert}} into it")
        for pattern in self.stack:
            if "expert" not in _compiled(pattern).groupindex:
                raise WeightsError(f"{pattern!r:.80} has no group (?P<expert>…) to tell experts by")
        if (
            isinstance(self.fp8, str)
            or not isinstance(self.fp8, Sequence)
            or not all(isinstance(it, str) for it in self.fp8)
        ):
            raise WeightsError(f"fp8 is a list of globs (got {self.fp8!r:.60})")
        pairs = () if callable(self.rename) or isinstance(self.rename, Mapping) else self.rename
        for pair in pairs:
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise WeightsError(
                    f"rename is a mapping, a function, or pairs such as (r'^old', 'new') (got {pair!r:.60})"
                )
        for dtype in self._dtypes().values():
            if not isinstance(dtype, torch.dtype) or _named(dtype) not in ITEM_BYTES:
                raise WeightsError(f"dtype is one that can be pushed, such as torch.bfloat16 (got {dtype!r:.40})")

    def __call__(self, source: Any) -> Source:
        """The changed source. Nothing is read, and nothing computed, before it is needed."""
        return Exported(self, as_source(source))

    def _dtypes(self) -> Mapping[str, torch.dtype]:
        if self.dtype is None:
            return {}
        return self.dtype if isinstance(self.dtype, Mapping) else {"*": self.dtype}


class Exported:
    """A source as it is after an export map."""

    def __init__(self, export: Export, source: Source) -> None:
        self._export, self.source, self.everywhere = export, source, source.everywhere

    def check(self) -> None:
        """Raise if what it was made of is not what it was."""
        confirm(self.source)

    @property
    def identity(self) -> str:
        """What is read, and what becomes of it."""
        read, export = identity_of(self.source), self._export
        if not read:
            return ""
        new_name = _renaming(export.rename)
        names = [(part.entry.name, new_name(part.entry.name)) for part in self.source.held()]
        made = f"{read} {names} {export.unstack} {export.stack} {export.fp8} {export.dtype}"
        return hashlib.blake2b(made.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def held(self) -> list[Shard]:
        export, parts = self._export, self.source.held()
        renamed = _renamed(parts, export.rename)
        unstacked = _unstacked(renamed, {_glob(pattern): to for pattern, to in export.unstack.items()})
        stacked = _stacked(unstacked, {_compiled(pattern): to for pattern, to in export.stack.items()})
        fp8 = {_glob(pattern): True for pattern in export.fp8}
        dtypes = {_glob(pattern): dtype for pattern, dtype in export._dtypes().items()}
        names, made = _Names(), list[Shard]()
        for part in stacked:
            old = part.entry.name
            for new in _quantised(part) if _first(old, fp8)[0] else [_converted(part, dtypes)]:
                names.give(new.entry.name, old)
                made.append(new)
        return made


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise WeightsError(f"{pattern!r:.80} is no regular expression: {error}") from None


def _glob(pattern: str) -> re.Pattern[str]:
    """A glob with a group for each `*` and `?`."""
    return re.compile(re.escape(pattern).replace(r"\*", "(.*)").replace(r"\?", "(.)"), re.DOTALL)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Names:
    """New names, each for one old one."""

    def __init__(self) -> None:
        self._given: dict[tuple[str, int], str] = {}

    def give(self, new: str, old: str, part: int = -1) -> None:
        first = self._given.setdefault((new, part), old)
        if first != old:
            raise WeightsError(f"{first} and {old} would both be called {new}")


def _renamed(parts: Iterable[Shard], rename: Rename) -> Iterator[Shard]:
    names, new_name = _Names(), _renaming(rename)
    for part in parts:
        old = part.entry.name
        if (new := new_name(old)) is not None:
            names.give(new, old)
            yield Shard(TensorSpec(new, part.entry.dtype, part.entry.shape), part.box, part.read)


def _renaming(rename: Rename) -> Callable[[str], str | None]:
    if callable(rename):
        return rename
    if isinstance(rename, Mapping):
        return lambda name: rename.get(name, name)
    patterns = [(_compiled(pattern), to) for pattern, to in rename]

    def in_turn(name: str) -> str | None:
        for pattern, to in patterns:
            if to is not None:
                name = _expanded(to, partial(pattern.sub, to, name))
            elif pattern.search(name):
                return None
        return name

    return in_turn


def _expanded(template: str, expand: Callable[[], str]) -> str:
    try:
        return expand()
    except (re.error, LookupError, ValueError) as error:
        raise WeightsError(f"{template!r:.80} cannot be filled in: {error}") from None


def _unstacked(parts: Iterable[Shard], templates: Mapping[re.Pattern[str], str]) -> Iterator[Shard]:
    names = _Names()
    for part in parts:
        old, dtype, shape = part.entry.name, part.entry.dtype, part.entry.shape
        match, template = _first(old, templates)
        if match is None or template is None:
            names.give(old, old)
            yield part
            continue
        if not shape:
            raise WeightsError(f"{old} has no dimension of experts to unstack")
        start, stop = part.box[0]
        for expert in range(start, stop):
            new = _expanded(template, partial(template.format, *match.groups(), expert=expert))
            names.give(new, f"{old}[{expert}]")
            yield Shard(TensorSpec(new, dtype, shape[1:]), part.box[1:], partial(_row, part.read, expert - start))


def _first(name: str, patterns: Mapping[re.Pattern[str], Any]) -> tuple[re.Match[str] | None, Any]:
    """The first pattern that matches a name, and what belongs to it."""
    for pattern, value in patterns.items():
        if match := pattern.fullmatch(name):
            return match, value
    return None, None


def _row(read: Callable[[], Tensor], number: int) -> Tensor:
    return read()[number]


def _stacked(parts: Iterable[Shard], templates: Mapping[re.Pattern[str], str | tuple[str, int]]) -> Iterator[Shard]:
    names, order = _Names(), list[Shard | str]()
    stacks: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
    counts: dict[str, int | None] = {}
    for part in parts:
        old = part.entry.name
        match, value = _first(old, templates)
        if match is None:
            names.give(old, old)
            order.append(part)
            continue
        template, experts = (value, None) if isinstance(value, str) else value
        groups = list(match.groups(""))
        number = groups.pop(match.re.groupindex["expert"] - 1)
        new = _expanded(template, partial(template.format, *groups))
        if not number.isdecimal():
            raise WeightsError(f"{old} has {number!r:.40} where {match.re.pattern!r:.80} expects an expert's number")
        names.give(new, match.re.pattern)
        names.give(new, old, int(number))
        if new not in stacks:
            order.append(new)
        stacks[new].append((int(number), part))
        counts[new] = experts
    for item in order:
        yield from [item] if isinstance(item, Shard) else _stack(item, stacks[item], counts[item])


def _stack(name: str, members: list[tuple[int, Shard]], experts: int | None) -> Iterator[Shard]:
    """Experts as boxes of one tensor, which is never put together."""
    here = {expert for expert, _ in members}
    count = max(here) + 1 if experts is None else experts
    if experts is None and len(here) < count:
        missing = min(set(range(count)) - here)
        raise WeightsError(
            f"expert {missing} of {name} is not here; if another rank has it, give the number of experts: "
            "stack={expression: (template, experts)}"
        )
    if max(here) >= count:
        raise WeightsError(f"{name} is said to have {count} experts, and here is number {max(here)}")
    first = members[0][1].entry
    stacked = TensorSpec(name, first.dtype, (count, *first.shape))
    for expert, part in sorted(members, key=lambda member: member[0]):
        if (part.entry.dtype, part.entry.shape) != (first.dtype, first.shape):
            raise WeightsError(f"{first.name} and {part.entry.name} differ in type or shape, and are not one {name}")
        yield Shard(stacked, ((expert, expert + 1), *part.box), partial(_as_row, part.read))


def _as_row(read: Callable[[], Tensor]) -> Tensor:
    return read().unsqueeze(0)


def _converted(part: Shard, dtypes: Mapping[re.Pattern[str], torch.dtype]) -> Shard:
    name, old, shape = part.entry.name, part.entry.dtype, part.entry.shape
    _, dtype = _first(name, dtypes)
    if dtype is None or old not in _FLOATS or _named(dtype) == old:
        return part
    return Shard(TensorSpec(name, _named(dtype), shape), part.box, lambda: part.read().to(dtype))


def _quantised(part: Shard) -> Iterator[Shard]:
    """A weight and its scales, from the weight."""
    name, dtype, shape = part.entry.name, part.entry.dtype, part.entry.shape
    if len(shape) != 2 or dtype not in _FLOATS:
        raise WeightsError(f"{name} is {dtype}{list(shape)}; only matrices of floating point become fp8")
    for (start, stop), size in zip(part.box, shape, strict=True):
        if start % BLOCK or (stop % BLOCK and stop != size):
            raise WeightsError(
                f"this rank has {start}…{stop} of {size} rows or columns of {name}, which cuts through blocks of "
                f"{BLOCK}; shard it by multiples of {BLOCK}, or leave it out of fp8"
            )
    pair = _Pair(name, part.read)
    yield Shard(TensorSpec(name, "float8_e4m3fn", shape), part.box, pair.weight)
    blocks = tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in part.box)
    yield Shard(
        TensorSpec(f"{name}_scale_inv", "float32", tuple(-(-size // BLOCK) for size in shape)), blocks, pair.scales
    )


class _Pair:
    """A quantised weight and its scales; scales are kept from when the weight is read until they are."""

    def __init__(self, name: str, read: Callable[[], Tensor]) -> None:
        self._name, self._read = name, read
        self._kept: Tensor | None = None

    @torch.no_grad()
    def weight(self) -> Tensor:
        weight_rc = self._read()
        blocks_RrCc = _blocks(weight_rc)
        self._kept = scales_RC = self._scales(blocks_RrCc)
        scaled = (blocks_RrCc / scales_RC[:, None, :, None]).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)
        rows, columns = weight_rc.shape
        return scaled.flatten(2).flatten(0, 1)[:rows, :columns]

    @torch.no_grad()
    def scales(self) -> Tensor:
        scales_RC, self._kept = self._kept, None
        return self._scales(_blocks(self._read())) if scales_RC is None else scales_RC

    def _scales(self, blocks_RrCc: Tensor) -> Tensor:
        largest_RC = blocks_RrCc.abs().amax((1, 3))
        if not largest_RC.isfinite().all():
            raise WeightsError(f"{self._name} has values that are not finite, or not in float32, and cannot become fp8")
        # The least normal number: a scale below it would be inexact, or 0.
        return (largest_RC / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny).masked_fill_(largest_RC == 0, 1.0)


def _blocks(weight_rc: Tensor) -> Tensor:
    """R × C blocks of 128 × 128, filled up with zeros."""
    rows, columns = weight_rc.shape
    filled = F.pad(weight_rc.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return filled.reshape(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
