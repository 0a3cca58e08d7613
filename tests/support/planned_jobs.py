"""What ranks do to find out whether a model runs by programs and costs that were made without it."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import stretto
from moe_jobs import CONFIG, batch
from stretto.costs import Costs
from stretto.layers import cut_layers, parse_layers
from stretto.model import CausalLM, causal_lm_loss


def planned(mesh: DeviceMesh, sizes: dict[str, int], text: str, costs: Costs) -> list[str]:
    """What differs if a model of these layers runs the program that was planned for them, or is woven by its costs."""
    described = parse_layers(text, ep=sizes.get("ep", 1))
    plan = stretto.schedules.interleaved(
        devices=sizes.get("pp", 1), stages_per_device=2, microbatches=4, overlap="pp" in sizes
    )
    stages = cut_layers(described, stages=plan.stages)
    program = stretto.lower(plan.on_mesh(sizes), layers=stages, costs=costs)
    config = dataclasses.replace(CONFIG, num_hidden_layers=len(described) - 2, first_k_dense_replace=1)
    over = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    losses, wrong = [], []
    given: dict[str, Any]
    for given in ({"program": program}, {"plan": plan, "costs": costs}):
        torch.manual_seed(0)
        pipe = stretto.Pipeline(CausalLM(config).layers(), **given, loss=causal_lm_loss, mesh=over)
        losses.append(pipe.step(*batch(config)).loss)
        if str(pipe.program) != str(program):
            wrong.append(f"another program is run with {list(given)}")
        pipe.close()
    return wrong if losses[0] == losses[1] else [*wrong, f"the losses are {losses}"]


def fitted(mesh: DeviceMesh, sizes: dict[str, int], text: str, path: str) -> list[str]:
    """What is wrong with costs fitted to steps of a model of these layers, which are saved; the model is woven by them,
    and runs what was planned with them.
    """
    described = parse_layers(text, ep=sizes.get("ep", 1))
    config = dataclasses.replace(CONFIG, num_hidden_layers=len(described) - 2, first_k_dense_replace=1)
    over = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    layers, timelines = CausalLM(config).layers(), []
    for overlap in (False, True):
        plan = stretto.schedules.interleaved(devices=sizes["pp"], stages_per_device=2, microbatches=4, overlap=overlap)
        pipe = stretto.Pipeline(layers, plan=plan, loss=causal_lm_loss, mesh=over)
        timelines.append(pipe.step(*batch(config), record=True).timeline)
        pipe.close()
    costs = [stretto.fit(*timelines) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(costs)
    assert costs[0] is not None
    if dist.get_rank() == 0:
        costs[0].save(path)
    stages = cut_layers(described, stages=plan.stages)
    program = stretto.lower(plan.on_mesh(sizes), layers=stages, costs=costs[0])
    pipe = stretto.Pipeline(layers, plan=plan, loss=causal_lm_loss, mesh=over, costs=costs[0])
    same = str(pipe.program) == str(program)
    pipe.close()
    return [] if same else ["the pipeline runs another program than was planned"]
