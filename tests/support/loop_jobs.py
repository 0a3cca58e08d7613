"""What ranks of a mesh do to find out whether the layers of examples/loop.py are trained as one process would."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import loop
import stretto
from mesh_jobs import Member, Sizes, differences


def batch(replicas: int) -> tuple[Tensor, Tensor]:
    """What all replicas get together."""
    every = [loop.batch(seed) for seed in range(replicas)]
    return torch.cat([tokens for tokens, _ in every]), torch.cat([targets for _, targets in every])


def trained(mesh: DeviceMesh, sizes: Sizes) -> list[str]:
    """What differs from the whole model on this rank, after a step."""
    member = Member(mesh, sizes)
    tokens, targets = batch(member.shape.replicas)
    model, twin = (nn.Sequential(*loop.layers()).double() for _ in range(2))
    loss = loop.loss(model(tokens), targets)
    loss.backward()
    plan = stretto.schedules.interleaved(
        devices=member.shape.pp, stages_per_device=2, microbatches=loop.MICROBATCHES, overlap=True
    )
    pipe = stretto.Pipeline(list(twin), plan=plan, loss=loop.loss, mesh=member.mesh)
    result = pipe.step(member.own(tokens), member.own(targets))
    wrong = differences(pipe, model)
    if not abs(result.loss - float(loss)) <= 1e-12 * float(loss):
        wrong.append(f"the loss is {result.loss}, not {float(loss)}")
    pipe.close()
    return wrong
