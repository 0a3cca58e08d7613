"""What ranks of a mesh do to push a model that they train."""

import torch
from torch.distributed.device_mesh import DeviceMesh

import stretto
from mesh_jobs import Member, Sizes
from stretto.model import CausalLM, ModelConfig, causal_lm_loss
from stretto.weights import Export, Sender


def model_of(config: ModelConfig) -> CausalLM:
    torch.manual_seed(1)
    return CausalLM(config)


def pushed(mesh: DeviceMesh, sizes: Sizes, config: ModelConfig, export: Export, address: str) -> str:
    """The assurance of a receiver that gets a pipeline's parameters, after each was doubled where it is trained."""
    member = Member(mesh, sizes)
    plan = member.plan("interleaved" if member.shape.pp > 1 else "one_f_one_b")
    layers = model_of(config).layers()
    pipe = stretto.Pipeline(layers, plan=plan, loss=causal_lm_loss, mesh=member.mesh)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.mul_(2)
    with Sender(member.mesh, device="cpu", bucket_bytes=8192) as sender:
        sender.register("doubled", export(pipe))
        report = sender.push("doubled", [address])
    pipe.close()
    return report.receivers[address]
