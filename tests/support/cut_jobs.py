"""What ranks do to find out whether pipelines of cut models train them right, under the models' own names."""

from typing import Any

import torch
from torch import Tensor, nn

import stretto
from causal_lms import LM, errors, exact, uncut
from strategies import SCHEDULES
from stretto.model import transformers_loss
from stretto.pipeline.named_layer import NamedLayer

MICROBATCHES = 4
KINDS = {
    "deepseek_v3": LM("deepseek_v3"),
    "llama": LM("llama", padding="left"),
    "mixtral": LM("mixtral", padding="right"),
    "qwen3": LM("qwen3", positions="packed"),
    "qwen3_moe": LM("qwen3_moe"),
}


def plan_of(mesh: Any, schedule: str) -> stretto.Plan:
    return SCHEDULES[schedule].make(devices=mesh.size(), microbatches=MICROBATCHES)


def pipeline(mesh: Any, layers: Any, schedule: str = "zb_h1", **more: Any) -> stretto.Pipeline:
    given = {"plan": plan_of(mesh, schedule), "loss": transformers_loss, "mesh": mesh, **more}
    return stretto.Pipeline(layers, **given)


def trained(mesh: Any, schedule: str, kind: str, **more: Any) -> dict[str, Any]:
    """What differs from the uncut model in loss and gradients, and which weight gradients are not deferred."""
    lm = KINDS[kind]
    model, (batch, labels) = lm.model(), lm.batch(2 * MICROBATCHES)
    with exact(kind):
        expected, grads = uncut(model, batch, labels, MICROBATCHES)
        pipe = pipeline(mesh, stretto.cut(model), schedule, **more)
        result = pipe.step(batch if len(batch) > 1 else batch["input_ids"], labels)
    report = pipe.split_report()
    found = {name: parameter.grad for name, parameter in pipe.named_parameters(remove_duplicate=False)}
    assert found.keys() == report.keys()
    pipe.close()
    return {
        "loss": abs(result.loss - expected) / expected,
        "grads": errors(found, grads, 1e-10),
        "at once": [name for name, deferred in report.items() if not deferred],
        "deferred": [name for name, deferred in report.items() if deferred],
    }


def all_kinds(mesh: Any, schedule: str) -> dict[str, dict[str, Any]]:
    return {kind: trained(mesh, schedule, kind) for kind in KINDS}


def with_recomputation(mesh: Any, **more: Any) -> list[Any]:
    results = [trained(mesh, "zb_v", kind, **more) for kind in ("mixtral", "qwen3")]
    return [(result["loss"] < 1e-10, result["grads"]) for result in results]


def states(mesh: Any, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """This rank's state after loading that of another model, and the other model's."""
    pipe = pipeline(mesh, stretto.cut(KINDS[kind].model()))
    other = LM(kind, seed=5).model().state_dict()
    pipe.load_state_dict(other)
    pipe.close()
    return pipe.state_dict(), other


def names(mesh: Any) -> dict[str, Any]:
    """The names that a pipeline shows."""
    model = KINDS["qwen3_moe"].model()
    pipe = pipeline(mesh, stretto.cut(model), gradients="float32")
    batch, labels = KINDS["qwen3_moe"].batch(2 * MICROBATCHES)
    pipe.step(batch["input_ids"], labels)
    theirs = dict(model.named_modules())
    found = {
        "parameters": {name for name, _ in pipe.named_parameters()},
        "main_grads": set(pipe.main_grads()),
        "state_dict": set(pipe.state_dict()),
        "modules": {name for name, _ in pipe.named_modules()} - theirs.keys(),
        "all modules": set(pipe.modules()) >= {module for _, module in pipe.named_modules()},
        "experts": [name for name, module in pipe.named_modules() if type(module).__name__ == "RoutedExperts"],
    }
    pipe.close()
    return found


def tied_by_name(mesh: Any) -> Any:
    """What differs if a function builds the layers, and the head is tied by the names of the model."""
    lm = KINDS["llama"]
    model, (batch, labels) = lm.model(), lm.batch(2 * MICROBATCHES)
    with exact("llama"):
        _, grads = uncut(model, batch, labels, MICROBATCHES)
        layers = stretto.cut(lm.model(tie_word_embeddings=False))  # whose head has other values
        tied = [("model.embed_tokens.weight", "lm_head.weight")]
        pipe = pipeline(mesh, layers.__getitem__, layer_count=len(layers), tied=tied)
        pipe.load_state_dict({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"})
        pipe.step(batch, labels)
    found = {name: parameter.grad for name, parameter in pipe.named_parameters(remove_duplicate=False)}
    pipe.close()
    return errors(found, grads, 1e-10)


def refused(mesh: Any, case: str) -> str:
    """What a pipeline of a cut model says about what is wrong."""
    model = KINDS["llama"].model()
    layers, more = stretto.cut(model), dict[str, Any]()
    if case == "an unknown tie":
        more["tied"] = [("model.embed_tokens.weight", "lm_head.wieght")]
    if case == "other shapes":
        more["tied"] = [("model.norm.weight", "lm_head.weight")]
    if case == "no module":
        more["recompute"] = ["0.*"]
    if case == "float16":
        model.half()
    if case == "one name twice":
        layers[1] = NamedLayer({"model.norm": nn.LayerNorm(2)})
    if case == "a hook":
        model.model.layers[1].mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda _: None)
        more["gradients"] = "float32"
    batch, labels = KINDS["llama"].batch(2 * MICROBATCHES)
    try:
        pipe = pipeline(mesh, layers, "dualpipe", **more)
        if case == "a state dict":
            state = model.state_dict()
            state["model.layers.1.more"] = state.pop("model.layers.0.mlp.up_proj.weight")
            state["model.norm.weight"] = torch.ones(3)
            pipe.load_state_dict(state)
        pipe.step(batch, labels)
    except (stretto.StrettoError, RuntimeError) as error:
        return str(error)
    return ""


def trains(mesh: Any) -> list[float]:
    """The losses of a model that is trained by AdamW, and the uncut model's own loss afterwards."""
    lm = LM("qwen3_moe", dtype=torch.float32)
    model, (batch, labels) = lm.model(), lm.batch(2 * MICROBATCHES)
    pipe = pipeline(mesh, stretto.cut(model), "one_f_one_b")
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        losses.append(pipe.step(batch["input_ids"], labels).loss)
        optimizer.step()
    every: list[dict[str, Tensor]] = [{} for _ in range(mesh.size())]
    torch.distributed.all_gather_object(every, pipe.state_dict())
    fresh = LM("qwen3_moe", seed=9, dtype=torch.float32).model()
    fresh.load_state_dict({name: value for state in every for name, value in state.items()})
    losses += [pipe.eval_step(batch["input_ids"], labels).loss, uncut(fresh, batch, labels, MICROBATCHES)[0]]
    pipe.close()
    return losses
