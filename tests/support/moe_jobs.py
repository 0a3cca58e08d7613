"""What ranks do to find out whether a pipelined mixture of experts is the whole model."""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import stretto
from devices import DEVICE
from strategies import SCHEDULES
from stretto.model import (
    CausalLM,
    ModelConfig,
    causal_lm_loss,
    layers,
    load_weights,
    save_pretrained,
    update_router_biases,
)
from stretto.moe import Router

MICROBATCHES, LENGTH = 8, 5
CONFIG = dataclasses.replace(ModelConfig.named("tiny"), vocab_size=29, hidden_size=16, num_attention_heads=2)


def batch(config: ModelConfig = CONFIG, rows: int = 2 * MICROBATCHES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    tokens = torch.randint(0, config.vocab_size, (rows, LENGTH + 1))
    return tokens[:, :-1].to(DEVICE), tokens[:, 1:].to(DEVICE)


def whole(config: ModelConfig, options: dict[str, bool]) -> tuple[CausalLM, float]:
    """The model after one backward over the whole batch, and its loss."""
    torch.manual_seed(1)
    model = CausalLM(config, **options).to(DEVICE, torch.float64)
    tokens, targets = batch(config)
    total, count = causal_lm_loss(model(tokens), targets)
    (total / count).backward()
    return model, float(total.detach() / count)


def trained(
    mesh: DeviceMesh, schedule: str, options: dict[str, bool], overlap: bool, tied: bool, **more_options: Any
) -> list[str]:
    """What differs from the whole model, on this rank, after a step."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, num_hidden_layers=6 if mesh.size() > 2 else 4)
    model, loss = whole(config, options)
    torch.manual_seed(1)
    twin = CausalLM(config, **options).to(DEVICE, torch.float64)
    more: dict[str, Any] = {"stages_per_device": 2, "overlap": True} if overlap else {}
    plan = SCHEDULES[schedule].make(devices=mesh.size(), microbatches=MICROBATCHES, **more)
    pipe = stretto.Pipeline(twin.layers(), plan=plan, loss=causal_lm_loss, mesh=mesh, **more_options)
    result = pipe.step(*batch(config))
    wrong = [] if abs(result.loss - loss) < 1e-12 * abs(loss) else [f"the loss is {result.loss}, not {loss}"]
    expected = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        grad = expected[name].grad
        if (grad is None) != (parameter.grad is None):
            wrong.append(f"{name} has a gradient in one of the two only")
        elif grad is not None and float((grad - parameter.grad).abs().max()) > 1e-12 * float(grad.abs().max()):
            wrong.append(f"{name} differs")
    deferred = pipe.split_report()
    wrong += [f"{name} is not deferred" for name, is_deferred in deferred.items() if "proj" in name and not is_deferred]
    for router in model.modules():
        if isinstance(router, Router):
            router.update_bias(0.01)
    update_router_biases(pipe, rate=0.01)
    biases = {name: value for name, value in model.state_dict().items() if "bias" in name}
    for name, value in pipe.state_dict().items():
        if "bias" in name and not torch.equal(value, biases[name]):
            wrong.append(f"{name} is {value.tolist()}")
    pipe.close()
    return wrong


def loaded(mesh: DeviceMesh, folder: str, sizes: dict[str, int]) -> list[str]:
    """What differs on this rank of a mesh from a checkpoint that has tied parameters once."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    torch.manual_seed(1)
    model = CausalLM(config, mtp=True)
    if mesh.get_local_rank() == 0:
        save_pretrained(model, folder)
    dist.barrier()
    torch.manual_seed(2)
    plan = SCHEDULES["one_f_one_b"].make(devices=sizes.get("pp", 1), microbatches=MICROBATCHES)
    whole = init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    pipe = stretto.Pipeline(layers(config, mtp=True), plan=plan, loss=causal_lm_loss, mesh=whole)
    load_weights(pipe, folder)
    expected = model.state_dict()
    state = {name: _whole(value) for name, value in pipe.state_dict().items()}
    wrong = [name for name, value in state.items() if not torch.equal(value.cpu(), expected[name])]
    pipe.close()
    return wrong


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def without_routers(mesh: DeviceMesh) -> list[str]:
    """What a pipeline without routers says of their biases; it can go on."""
    dense = dataclasses.replace(CONFIG, first_k_dense_replace=CONFIG.num_hidden_layers)
    plan = SCHEDULES["one_f_one_b"].make(devices=mesh.size(), microbatches=MICROBATCHES)
    pipe = stretto.Pipeline(layers(dense), plan=plan, loss=causal_lm_loss, mesh=mesh)
    told = ""
    try:
        update_router_biases(pipe)
    except stretto.PipelineError as error:
        told = str(error)
    result = pipe.step(*batch())
    pipe.close()
    return [told, str(result.count)]


def recomputed(mesh: DeviceMesh, schedule: str, options: dict[str, Any]) -> list[str]:
    """The same with recomputation, which counts no token twice."""
    return trained(mesh, schedule, {"mtp": True}, False, False, **options)


def bypassed(mesh: DeviceMesh, what: str) -> str:
    """What a pipeline says of a block that would not be called."""
    model = CausalLM(CONFIG)
    block = model.get_submodule("model.layers.1")
    match what:
        case "hook":
            block.register_forward_hook(lambda *_: None)
        case "forward":
            block.forward = block.forward
    plan = SCHEDULES["one_f_one_b"].make(devices=mesh.size(), microbatches=MICROBATCHES)
    try:
        pipe = stretto.Pipeline(model.layers(), plan=plan, loss=causal_lm_loss, mesh=mesh)
        pipe.step(*batch())
    except stretto.PipelineError as error:
        return str(error)
    return ""
