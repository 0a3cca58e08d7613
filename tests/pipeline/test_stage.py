"""A stage by itself: several microbatches under way at once."""

import torch
from torch import Tensor, nn

import stretto
from stretto.pipeline.gradients import Gradients
from stretto.pipeline.pytree import LEAF, Tree
from stretto.pipeline.rng import RngKey
from stretto.pipeline.stage import Stage
from stretto.schedules import gpipe

WIDTH, TOKENS = 4, 3


class Projected(nn.Module):
    """With one row per microbatch, the position's gradient is the very tensor that the weight's is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.position = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.position.unsqueeze(0)  # type: ignore[no-any-return]


def test_gradients_that_parameters_took_are_not_those_that_weights_are_still_owed() -> None:
    torch.manual_seed(0)
    layer, plain = Projected().double(), Projected().double()
    layer.load_state_dict(plain.state_dict())
    anatomy = stretto.lower(gpipe(devices=2, microbatches=2)).anatomy
    gradients = Gradients()
    stage = Stage({0: layer}, anatomy, 1, gradients=gradients)
    gradients.begin({1: stage.parameters()})
    inputs, grads = torch.randn(2, 1, TOKENS, WIDTH).double(), torch.randn(2, 1, TOKENS, WIDTH).double()
    with stage.running(RngKey(), training=True):
        for k in range(2):
            stage.forward(k, 0, Tree([inputs[k]], LEAF, [True]))
        returned = [stage.backward(k, 0, [grads[k].clone()])[0] for k in range(2)]
        kept = [grad.clone() for grad in returned if grad is not None]
        for k in range(2):
            stage.weight(k, 0)
    gradients.give_out()
    plain(inputs.flatten(0, 1)).backward(grads.flatten(0, 1))
    for mine, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returned, kept, rtol=0, atol=0)
