"""The GPU's kernel that adds gradients to sums gives what PyTorch gives, to the bit.

Where there is no GPU, it runs in Triton's interpreter, if Triton is installed.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from stretto.pipeline import gradient_buffers, sum_kernels
from stretto.pipeline.gradient_buffers import Block, Buffer, Sum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 4095, 4096, 10_000])
def test_sums_are_pytorchs_to_the_bit(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(size)
    sums, grads = torch.randn(size, device=DEVICE), torch.randn(size, device=DEVICE).to(dtype)
    expected = sums + grads
    sum_kernels.add(sums, grads)
    assert torch.equal(sums, expected)


def test_large_gradients_of_few_bits_are_added_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    run = sum_kernels.add
    monkeypatch.setattr(sum_kernels, "add", lambda sums, grads: (added.append(grads.numel()), run(sums, grads)))
    monkeypatch.setattr(gradient_buffers, "_LARGE", 100)
    if DEVICE.type == "cpu":
        monkeypatch.setattr(gradient_buffers, "has_kernels", lambda *_: True)
    for rows, kinds in ((20, "float32"), (20, "bfloat16"), (2, "bfloat16")):
        dtype = getattr(torch, kinds)
        parameter = nn.Parameter(torch.zeros(rows, 8, dtype=dtype, device=DEVICE))
        sum_ = Sum(parameter, torch.float32, dtype)
        buffer = Buffer([Block([sum_], shared=False)])
        buffer.renew()
        grad = torch.randn(rows, 8, device=DEVICE).to(dtype)
        for _ in range(3):
            sum_.add(grad)
        sum_.add(grad.T.contiguous().T)  # of other strides
        assert sum_.value is not None
        assert torch.allclose(sum_.value, 4 * grad.float(), rtol=1e-6)
    assert added == [160, 160]  # the first is copied, and the last is not laid out row by row
