"""Triton kernels that pack and unpack rows, to the bit as `stretto.moe.fp8` does.

They compute float8 numbers from the bits of float32, since Triton has float8_e4m3fn only on newer GPUs. A float32 has
its exponent, with 127 added, in bits 23 to 30; a float8 has its own, with 7 added, in bits 3 to 6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stretto.moe.kernels import OPTIONS, on_device_of

_TILES = 8  # for each program


@triton.jit
def _to_float8(x):  # type: ignore[no-untyped-def]
    """Return the bytes of numbers of at most 448, rounded to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + (magnitude >> 20 & 1) >> 20) - (120 << 3)
    tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)  # this sum is a multiple of 2⁻⁹
    return tl.where(magnitude < 121 << 23, tiny, rounded) | (bits >> 24 & 0x80)


@triton.jit
def _from_float8(byte):  # type: ignore[no-untyped-def]
    """Return the numbers that these bytes stand for. NaN is not among them, since a scale says it."""
    magnitude = byte & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    x = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # 2⁻⁹
    signed = x.to(tl.int32, bitcast=True) | (byte & 0x80) << 24  # Triton's -x is 0 - x, and so +0 for 0
    return signed.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _pack(x, packed, features, tiles, stride, TILE: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    feature = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(x + row * features + feature, mask=feature < features, other=0.0).to(tl.float32)
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # in bits, of which NaN has the largest
    exponent = most >> 23
    finite = exponent < 255
    scale = tl.maximum(exponent - 8 + ((most & 0x7FFFFF) > 0x600000).to(tl.int32), 1)  # 448 = 1.75 × 2⁸
    inverse = (254 - scale << 23).to(tl.float32, bitcast=True)
    byte = tl.where(finite[:, None], _to_float8(values * inverse[:, None]), 0x7F)
    start = packed + row * stride
    tl.store(start + feature, byte.to(tl.uint8), mask=feature < features)
    bits = tl.where(finite, scale << 23, 0x7FC00000)
    for k in tl.static_range(4):  # since scales may lie at any byte
        tl.store(start + features + 4 * tile + k, (bits >> 8 * k & 0xFF).to(tl.uint8), mask=tile < tiles)


def pack(x_RD: Tensor, *, tile: int) -> Tensor:
    x_RD, (rows, features) = x_RD.contiguous(), x_RD.shape
    tiles = triton.cdiv(features, tile)
    stride = features + 4 * tiles
    packed = x_RD.new_empty(rows, stride, dtype=torch.uint8)
    with on_device_of(x_RD):
        _pack[rows, triton.cdiv(tiles, _TILES)](x_RD, packed, features, tiles, stride, tile, _TILES, **OPTIONS)
    return packed


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(packed, order, x, features, tiles, stride, limit, TILE: tl.constexpr, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    feature = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    source = row
    if order is not None:
        source = tl.load(order + row)
    start = packed + source * stride
    bits = tl.zeros((TILES,), tl.int32)
    for k in tl.static_range(4):
        bits |= tl.load(start + features + 4 * tile + k, mask=tile < tiles, other=0).to(tl.int32) << 8 * k
    scale = bits.to(tl.float32, bitcast=True)
    byte = tl.load(start + feature, mask=feature < features, other=0).to(tl.int32)
    values = _from_float8(byte) * scale[:, None]
    values = tl.where(values > limit, limit, tl.where(values < -limit, -limit, values))  # NaN stays NaN
    tl.store(x + row * features + feature, values.to(x.dtype.element_ty), mask=feature < features)


def unpack(packed: Tensor, order_R: Tensor | None, *, features: int, dtype: torch.dtype, tile: int) -> Tensor:
    packed, rows = packed.contiguous(), len(packed if order_R is None else order_R)
    tiles, limit = triton.cdiv(features, tile), torch.finfo(dtype).max
    x_RD = packed.new_empty(rows, features, dtype=dtype)
    with on_device_of(packed):
        _unpack[rows, triton.cdiv(tiles, _TILES)](
            packed, order_R, x_RD, features, tiles, packed.shape[1], limit, tile, _TILES, **OPTIONS
        )
    return x_RD
