"""Export maps: convert the names, dtypes and layout of a trainer's tensors to those that an engine loads."""

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
"""Rows and columns of the block of a weight that shares a scale."""
_FP8_MAX = 448.0  # of float8_e4m3fn
_FLOATS = {"float16", "bfloat16", "float32", "float64"}


@dataclass(frozen=True)
class Export:
    """The conversions to apply, in this order; each step sees the names that the previous step produced.

    1. `rename`: {name: new name}, [(regular expression, replacement), …] applied in turn anywhere in a name, or a
       function of the name. A tensor whose new name is None is left out.
    2. `unstack`: {glob: template}. A tensor [experts, …] becomes one tensor per expert, named by the template:
       `{expert}` is its number, and `{0}`, `{1}`, … are the texts that matched the glob's `*` and `?`.
    3. `split`: {glob: (template, template, …)}. A tensor is cut along its first dimension into as many equal parts as
       there are templates, such as `gate_up_proj` into `gate_proj` and `up_proj`. `{0}`, `{1}`, … are as in `unstack`.
    4. `stack`: {regular expression: template}, the reverse of `unstack`. The expression matches a whole name and has a
       group called `expert`; `{0}`, `{1}`, … are its other groups. Ranks that hold only some of the experts must give
       their total number: {regular expression: (template, experts)}.
    5. `fp8`: globs of matrices to quantise to float8_e4m3fn in blocks of 128 × 128, from the values before `dtype`
       applies. NAME is then accompanied by NAME_scale_inv in float32; multiply a block by its scale to dequantise it.
    6. `dtype`: the dtype for all other tensors of 16 to 64-bit floating point, or {glob: dtype}, where the first match
       counts.

    >>> export = Export(rename=[(r"^module\\.", "")], unstack={"*.experts.up": "{0}.experts.{expert}.up"})
    >>> [shard.entry.name for shard in export({"module.mlp.experts.up": torch.zeros(2, 4, 4)}).held()]
    ['mlp.experts.0.up', 'mlp.experts.1.up']
    """

    rename: Rename = ()
    unstack: Mapping[str, str] = field(default_factory=dict)
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)
    stack: Mapping[str, str | tuple[str, int]] = field(default_factory=dict)
    fp8: Sequence[str] = ()
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None

    def __post_init__(self) -> None:
        for template in self.unstack.values():
            if "{expert}" not in template:
                raise WeightsError(f"{template!r:.80} names all experts alike; put {{expert}} into it")
        for pattern, templates in self.split.items():
            if isinstance(templates, str) or not isinstance(templates, Sequence) or not templates:
                raise WeightsError(
                    f"split is a tuple of names for each glob, such as ('{{0}}.gate', '{{0}}.up') "
                    f"(got {templates!r:.60} for {pattern!r:.60})"
                )
        for pattern in self.stack:
            if "expert" not in _compiled(pattern).groupindex:
                raise WeightsError(f"{pattern!r:.80} has no group (?P<expert>…) to tell experts by")
        if (
            isinstance(self.fp8, str)
            or not isinstance(self.fp8, Sequence)
            or not all(isinstance(pattern, str) for pattern in self.fp8)
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
        """Return the converted source. Tensors are read and converted only when they are needed."""
        return Exported(self, as_source(source))

    def _dtypes(self) -> Mapping[str, torch.dtype]:
        if self.dtype is None:
            return {}
        return self.dtype if isinstance(self.dtype, Mapping) else {"*": self.dtype}


class Exported:
    """A source with an export map applied."""

    def __init__(self, export: Export, source: Source) -> None:
        self._export, self.source, self.everywhere = export, source, source.everywhere

    def check(self) -> None:
        """Raise if the underlying source has changed."""
        confirm(self.source)

    @property
    def identity(self) -> str:
        """Identifies the underlying source and the conversions; empty if the source has no identity."""
        source_identity, export = identity_of(self.source), self._export
        if not source_identity:
            return ""
        new_name = _renaming(export.rename)
        names = [(shard.entry.name, new_name(shard.entry.name)) for shard in self.source.held()]
        conversions = f"{export.unstack} {export.split} {export.stack} {export.fp8} {export.dtype}"
        description = f"{source_identity} {names} {conversions}"
        return hashlib.blake2b(description.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def held(self) -> list[Shard]:
        export, shards = self._export, self.source.held()
        renamed = _renamed(shards, export.rename)
        unstacked = _unstacked(renamed, {_glob(pattern): to for pattern, to in export.unstack.items()})
        split = _split(unstacked, {_glob(pattern): to for pattern, to in export.split.items()})
        stacked = _stacked(split, {_compiled(pattern): to for pattern, to in export.stack.items()})
        fp8 = {_glob(pattern): True for pattern in export.fp8}
        dtypes = {_glob(pattern): dtype for pattern, dtype in export._dtypes().items()}
        names, exported = _Names(), list[Shard]()
        for shard in stacked:
            old = shard.entry.name
            for new in _quantised(shard) if _first(old, fp8)[0] else [_converted(shard, dtypes)]:
                names.give(new.entry.name, old)
                exported.append(new)
        return exported


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise WeightsError(f"{pattern!r:.80} is no regular expression: {error}") from None


def _glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob to a regular expression with a group for each `*` and `?`."""
    return re.compile(re.escape(pattern).replace(r"\*", "(.*)").replace(r"\?", "(.)"), re.DOTALL)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Names:
    """The new names that are in use, each for one old name."""

    def __init__(self) -> None:
        self._old_names: dict[tuple[str, int], str] = {}

    def give(self, new: str, old: str, expert: int = -1) -> None:
        """Record a new name; raise WeightsError if another tensor already has it."""
        first = self._old_names.setdefault((new, expert), old)
        if first != old:
            raise WeightsError(f"{first} and {old} would both be called {new}")


def _renamed(shards: Iterable[Shard], rename: Rename) -> Iterator[Shard]:
    names, new_name = _Names(), _renaming(rename)
    for shard in shards:
        old = shard.entry.name
        if (new := new_name(old)) is not None:
            names.give(new, old)
            yield Shard(TensorSpec(new, shard.entry.dtype, shard.entry.shape), shard.box, shard.read)


def _renaming(rename: Rename) -> Callable[[str], str | None]:
    """Return the function that maps an old name to its new name, or to None."""
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
    """Return the expanded template; raise WeightsError if it refers to groups that do not exist."""
    try:
        return expand()
    except (re.error, LookupError, ValueError) as error:
        raise WeightsError(f"{template!r:.80} cannot be filled in: {error}") from None


def _unstacked(shards: Iterable[Shard], templates: Mapping[re.Pattern[str], str]) -> Iterator[Shard]:
    """Replace each stacked tensor by one tensor per expert."""
    names = _Names()
    for shard in shards:
        old, dtype, shape = shard.entry.name, shard.entry.dtype, shard.entry.shape
        match, template = _first(old, templates)
        if match is None or template is None:
            names.give(old, old)
            yield shard
            continue
        if not shape:
            raise WeightsError(f"{old} has no dimension of experts to unstack")
        start, stop = shard.box[0]
        for expert in range(start, stop):
            new = _expanded(template, partial(template.format, *match.groups(), expert=expert))
            names.give(new, f"{old}[{expert}]")
            yield Shard(TensorSpec(new, dtype, shape[1:]), shard.box[1:], partial(_row, shard.read, expert - start))


def _first(name: str, patterns: Mapping[re.Pattern[str], Any]) -> tuple[re.Match[str] | None, Any]:
    """Return the match of the first pattern that matches a whole name, and the pattern's value."""
    for pattern, value in patterns.items():
        if match := pattern.fullmatch(name):
            return match, value
    return None, None


def _row(read: Callable[[], Tensor], number: int) -> Tensor:
    return read()[number]


def _split(shards: Iterable[Shard], templates: Mapping[re.Pattern[str], Sequence[str]]) -> Iterator[Shard]:
    """Cut each matching tensor into equal parts along its first dimension."""
    names = _Names()
    for shard in shards:
        old, dtype, shape = shard.entry.name, shard.entry.dtype, shard.entry.shape
        match, parts = _first(old, templates)
        if match is None:
            names.give(old, old)
            yield shard
            continue
        if not shape or shape[0] % len(parts):
            raise WeightsError(f"{old} has the shape {shape}, and cannot be split into {len(parts)} equal parts")
        (start, stop), each = shard.box[0], shape[0] // len(parts)
        for number, template in enumerate(parts):
            new = _expanded(template, partial(template.format, *match.groups()))
            names.give(new, f"{old}[{number * each}:{(number + 1) * each}]")
            low, high = max(start, number * each), min(stop, (number + 1) * each)
            if low < high or not each:  # this rank has some of the part, or the part is empty
                box = ((low - number * each, high - number * each), *shard.box[1:])
                read = partial(_rows, shard.read, low - start, high - start)
                yield Shard(TensorSpec(new, dtype, (each, *shape[1:])), box, read)


def _rows(read: Callable[[], Tensor], start: int, stop: int) -> Tensor:
    return read()[start:stop]


def _stacked(shards: Iterable[Shard], templates: Mapping[re.Pattern[str], str | tuple[str, int]]) -> Iterator[Shard]:
    """Replace the tensors of single experts by shards of one stacked tensor, at the place of the first expert."""
    names, order = _Names(), list[Shard | str]()
    stacks: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
    counts: dict[str, int | None] = {}
    for shard in shards:
        old = shard.entry.name
        match, value = _first(old, templates)
        if match is None:
            names.give(old, old)
            order.append(shard)
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
        stacks[new].append((int(number), shard))
        counts[new] = experts
    for item in order:
        yield from [item] if isinstance(item, Shard) else _stack(item, stacks[item], counts[item])


def _stack(name: str, members: list[tuple[int, Shard]], experts: int | None) -> Iterator[Shard]:
    """Yield experts as regions of one tensor, which is never materialised."""
    held = {expert for expert, _ in members}
    count = max(held) + 1 if experts is None else experts
    if experts is None and len(held) < count:
        missing = min(set(range(count)) - held)
        raise WeightsError(
            f"expert {missing} of {name} is not here; if another rank has it, give the number of experts: "
            "stack={expression: (template, experts)}"
        )
    if max(held) >= count:
        raise WeightsError(f"{name} is said to have {count} experts, and here is number {max(held)}")
    first = members[0][1].entry
    stacked = TensorSpec(name, first.dtype, (count, *first.shape))
    for expert, shard in sorted(members, key=lambda member: member[0]):
        if (shard.entry.dtype, shard.entry.shape) != (first.dtype, first.shape):
            raise WeightsError(f"{first.name} and {shard.entry.name} differ in type or shape, and are not one {name}")
        yield Shard(stacked, ((expert, expert + 1), *shard.box), partial(_as_row, shard.read))


def _as_row(read: Callable[[], Tensor]) -> Tensor:
    return read().unsqueeze(0)


def _converted(shard: Shard, dtypes: Mapping[re.Pattern[str], torch.dtype]) -> Shard:
    name, old, shape = shard.entry.name, shard.entry.dtype, shard.entry.shape
    _, dtype = _first(name, dtypes)
    if dtype is None or old not in _FLOATS or _named(dtype) == old:
        return shard
    return Shard(TensorSpec(name, _named(dtype), shape), shard.box, lambda: shard.read().to(dtype))


def _quantised(shard: Shard) -> Iterator[Shard]:
    """Yield the quantised weight and its scales."""
    name, dtype, shape = shard.entry.name, shard.entry.dtype, shard.entry.shape
    if len(shape) != 2 or dtype not in _FLOATS:
        raise WeightsError(f"{name} is {dtype}{list(shape)}; only matrices of floating point become fp8")
    for (start, stop), size in zip(shard.box, shape, strict=True):
        if start % BLOCK or (stop % BLOCK and stop != size):
            raise WeightsError(
                f"this rank has {start}…{stop} of {size} rows or columns of {name}, which cuts through blocks of "
                f"{BLOCK}; shard it by multiples of {BLOCK}, or leave it out of fp8"
            )
    pair = _Pair(name, shard.read)
    yield Shard(TensorSpec(name, "float8_e4m3fn", shape), shard.box, pair.weight)
    blocks = tuple((start // BLOCK, -(-stop // BLOCK)) for start, stop in shard.box)
    yield Shard(
        TensorSpec(f"{name}_scale_inv", "float32", tuple(-(-size // BLOCK) for size in shape)), blocks, pair.scales
    )


class _Pair:
    """A quantised weight and its scales; reading the weight keeps its scales until they are read too."""

    # Shapes: weight_rc is rows × columns, blocks_RrCc is block rows × 128 × block columns × 128, scales_RC is per block

    def __init__(self, name: str, read: Callable[[], Tensor]) -> None:
        self._name, self._read = name, read
        self._kept: Tensor | None = None

    @torch.no_grad()
    def weight(self) -> Tensor:
        weight_rc = self._read()
        blocks_RrCc = _blocks(weight_rc)
        self._kept = scales_RC = self._scales(blocks_RrCc)
        scaled = (blocks_RrCc / scales_RC[:, None, :, None]).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
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
        # No scale is below the smallest normal number, where it would be inexact or 0.
        return (largest_RC / _FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny).masked_fill_(largest_RC == 0, 1.0)


def _blocks(weight_rc: Tensor) -> Tensor:
    """Cut a weight into R × C blocks of 128 × 128, padded with zeros."""
    rows, columns = weight_rc.shape
    padded = F.pad(weight_rc.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
