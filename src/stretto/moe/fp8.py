"""Rows as bytes: float8_e4m3fn with a scale for each tile of 128 features.

A scale is the least power of two s ≥ 2⁻¹²⁶ with which the tile's largest number, divided by s, is at most 448. So only
the rounding to float8 changes a number: |x̂ − x| ≤ max(2⁻⁴ |x|, 2⁻¹⁰ s), where s < max|x| / 224 of the tile, or s is
2⁻¹²⁶. (In float16, add 2⁻²⁵: its own rounding of tiny numbers.) If a number of a tile is infinite or NaN, or beyond
448 · 2¹²⁷, which only float64 has, then the whole tile arrives as NaN.

R rows, D features, t tiles of a row.
"""

import torch
from torch import Tensor

from stretto.moe.kernels import has_kernels

_TILE = 128
_LEAST, _MOST = -126, 127  # exponents of scales


def pack(x_RD: Tensor) -> Tensor:
    """Return the bytes of each row: D numbers in float8, then its scales in float32."""
    if has_kernels(x_RD):
        from stretto.moe import fp8_kernels

        return fp8_kernels.pack(x_RD, tile=_TILE)
    exact_RD = x_RD.to(torch.promote_types(x_RD.dtype, torch.float32))
    scales_Rt = _scales(exact_RD)
    float8_RD = (exact_RD / _of_features(scales_Rt, x_RD.shape[1])).to(torch.float8_e4m3fn)
    scales = scales_Rt.flatten().view(torch.uint8).view(len(x_RD), 4 * scales_Rt.shape[1])
    return torch.cat([float8_RD.view(torch.uint8), scales], dim=1)


def unpack(packed: Tensor, order_R: Tensor | None = None, *, features: int, dtype: torch.dtype) -> Tensor:
    """Return the rows that these bytes stand for; with an order, those at these places."""
    if has_kernels(packed, dtype=dtype):
        from stretto.moe import fp8_kernels

        return fp8_kernels.unpack(packed, order_R, features=features, dtype=dtype, tile=_TILE)
    if order_R is not None:
        packed = packed.index_select(0, order_R)
    float8_RD = packed[:, :features].view(torch.float8_e4m3fn)
    scales = packed[:, features:].clone(memory_format=torch.contiguous_format).flatten()  # aligned to four bytes
    scales_Rt = scales.view(torch.float32).view(len(packed), _tiles(features))
    # bfloat16 has all float8 numbers and all scales, and a product is rounded once, as if it were computed in float32
    exact = dtype if dtype == torch.bfloat16 else torch.promote_types(dtype, torch.float32)
    x_RD, most = float8_RD.to(exact), torch.finfo(dtype).max  # which rounding may exceed
    if features % _TILE:
        x_RD *= _of_features(scales_Rt, features)
    else:
        x_RD.view(len(packed), _tiles(features), _TILE).mul_(scales_Rt.to(exact)[..., None])
    return x_RD.clamp_(-most, most).to(dtype)


def _scales(x_RD: Tensor) -> Tensor:
    """Return the scale of each tile, exactly: a float32 is a power of two if it has only an exponent."""
    rows, features = x_RD.shape
    tiles = _tiles(features)
    padded = torch.nn.functional.pad(x_RD.abs(), (0, tiles * _TILE - features))
    most_Rt = padded.view(rows, tiles, _TILE).amax(-1)
    fraction, exponent = torch.frexp(most_Rt)  # fraction × 2 ** exponent, and 448 = 0.875 × 2⁹
    exponent = (exponent - 9 + (fraction > 0.875)).where(most_Rt > 0, _LEAST).clamp(min=_LEAST)
    scales_Rt = (exponent.clamp(max=_MOST) + 127 << 23).to(torch.int32).view(torch.float32)
    return scales_Rt.where(most_Rt.isfinite() & (exponent <= _MOST), torch.nan)


def _tiles(features: int) -> int:
    return -(-features // _TILE)


def _of_features(scales_Rt: Tensor, features: int) -> Tensor:
    """Return each feature's scale."""
    return scales_Rt.repeat_interleave(_TILE, dim=1)[:, :features]
