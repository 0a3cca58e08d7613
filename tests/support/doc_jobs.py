"""What fragments of code in the docs may use, and where they run: on real ranks."""

import contextlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import loop
import stretto
from causal_lms import LM
from mesh_jobs import differences
from stretto.ir.mesh import MeshShape
from stretto.model import CausalLM, ModelConfig, causal_lm_loss, from_pretrained, transformers_loss
from stretto.weights import Receiver, status

Names = dict[str, Any]
WIDTH, ROWS = 6, 16


def run_fragment(mesh: DeviceMesh, code: str, given: str, folder: str) -> str:
    """Run code with the names that `given` prepares; return what this rank printed."""
    output = io.StringIO()
    with GIVEN[given](mesh, Path(folder)) as names, contextlib.redirect_stdout(output):
        exec(code, names)
    return output.getvalue()


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(8)]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def _batch() -> tuple[Tensor, Tensor]:
    return torch.ones(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)


def _pipeline(mesh: DeviceMesh) -> stretto.Pipeline:
    plan = stretto.schedules.one_f_one_b(devices=mesh.size(), microbatches=4)
    return stretto.Pipeline(_layers(), plan=plan, loss=_loss, mesh=mesh)


@contextmanager
def training(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """Layers, a plan, a loss, a batch and a mesh, from which a pipeline is made and trained."""
    del folder
    plan = stretto.schedules.dualpipe(devices=mesh.size(), microbatches=8)
    tokens, targets = _batch()
    names = {"stretto": stretto, "torch": torch, "mesh": mesh, "plan": plan}
    names |= {"layers": _layers(), "loss": _loss, "tokens": tokens, "targets": targets}
    yield names
    pipe = names["pipe"]
    gradients = [p.grad for p in pipe.parameters()] if "masters" not in names else list(pipe.main_grads().values())
    assert gradients
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)
    pipe.close()


@contextmanager
def language_model(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """The same for a model of transformers, and a batch of a tokenizer."""
    lm = LM("qwen3_moe", padding="right")
    with training(mesh, folder) as names:
        batch, labels = lm.batch(ROWS)
        names |= {"model": lm.model(), "tokens": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        names["labels"] = labels
        yield names


@contextmanager
def data_parallel(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """The same for layers with experts, where the mesh is made here: on CPUs, of two stages and two expert ranks."""
    del folder
    _, replica = MeshShape.of({"dp": 1, "pp": 2, "ep": 2}).place(mesh.get_rank())
    batches = [loop.batch(seed) for seed in range(2)]
    names = {"stretto": stretto, "torch": torch, "layers": [layer.double() for layer in loop.layers()]}
    names["init_device_mesh"] = lambda _, __, **rest: init_device_mesh("cpu", (1, 2, 2), **rest)
    names |= {"loss": loop.loss, "my_tokens": batches[replica][0], "my_targets": batches[replica][1]}
    yield names
    pipe, alone = names["pipe"], nn.Sequential(*loop.layers()).double()
    loop.loss(alone(torch.cat([tokens for tokens, _ in batches])), torch.cat([it for _, it in batches])).backward()
    torch.testing.assert_close(names["norm"], nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    assert differences(pipe, alone) == []
    pipe.close()


@contextmanager
def checkpointing(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """A trained pipeline with its optimizer, and a pipeline of another plan."""
    pipe = _pipeline(mesh)
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(*_batch())
    optimizer.step()
    plan = stretto.schedules.dualpipe(devices=mesh.size(), microbatches=4)
    torch.manual_seed(1)
    other = stretto.Pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(8)], plan=plan, loss=_loss, mesh=mesh)
    names: Names = {"torch": torch, "pipe": pipe, "optimizer": optimizer, "other": other}
    with contextlib.chdir(folder):
        yield names
    assert other.step_count == pipe.step_count == 1
    assert other.eval_step(*_batch()).loss == pipe.eval_step(*_batch()).loss
    moments: list[Names] = [{}] * mesh.size()
    own = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in pipe.named_parameters()}
    dist.all_gather_object(moments, own)
    expected = {name: moment for rank in moments for name, moment in rank.items()}
    fresh = names["fresh"].state
    assert all(torch.equal(fresh[p]["exp_avg"], expected[name]) for name, p in other.named_parameters())
    pipe.close()
    other.close()


@contextmanager
def own_model(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """The layers of a model of ours, which is trained for a step."""
    del folder
    config = ModelConfig.named("tiny")
    torch.manual_seed(0)
    tokens = torch.randint(config.vocab_size, (8, 6))
    plan = stretto.schedules.interleaved(devices=mesh.size(), stages_per_device=2, microbatches=4, overlap=True)
    names: Names = {"stretto": stretto, "mesh": mesh, "plan": plan, "loss": causal_lm_loss}
    names["layers"] = CausalLM(config).layers()
    yield names
    assert names["pipe"].step(tokens, tokens).loss > 0
    names["pipe"].close()


@contextmanager
def trained_model(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """The sizes of a model of ours, and a trained pipeline of its layers, whose experts the ranks share."""
    config, names = ModelConfig.named("tiny"), {"dcp": dcp}
    torch.manual_seed(0)
    before = CausalLM(config)
    torch.manual_seed(0)
    with contextlib.chdir(folder), _added_to(CausalLM(config).layers(), causal_lm_loss, mesh) as names["pipe"]:
        yield {**names, "config": config}
        dist.barrier()
        after = from_pretrained("trained", dtype=torch.float32).state_dict()
    assert all(torch.equal(after[name], value.detach() + 1) for name, value in before.named_parameters())


@contextmanager
def trained_cut_model(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """The same for a model of transformers, which is another one on each rank but for its experts."""
    lm = LM("qwen3_moe", padding="right")
    model, names = lm.model(), {"dcp": dcp}
    with contextlib.chdir(folder), _added_to(stretto.cut(model), transformers_loss, mesh) as names["pipe"]:
        yield {**names, "model": model}
        dist.barrier()
        after = type(model).from_pretrained("trained").state_dict()
    assert all(torch.equal(after[name], value.detach() + 1) for name, value in lm.model().named_parameters())


@contextmanager
def _added_to(layers: list[nn.Module], loss: Any, mesh: DeviceMesh) -> Iterator[stretto.Pipeline]:
    """A pipeline over ranks that share the layers' experts, with 1 added to all parameters."""
    over = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("ep",))
    plan = stretto.schedules.one_f_one_b(devices=1, microbatches=4)
    pipe = stretto.Pipeline(layers, plan=plan, loss=loss, mesh=over)
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter += 1
    yield pipe
    pipe.close()


@contextmanager
def evaluating(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """A pipeline that classifies, and a batch that its microbatches cannot share equally."""
    del folder
    layers = _layers()
    plan = stretto.schedules.one_f_one_b(devices=mesh.size(), microbatches=4)
    pipe = stretto.Pipeline(layers, plan=plan, loss=nn.functional.cross_entropy, mesh=mesh)
    tokens, targets = torch.randn(7, WIDTH), torch.arange(7) % WIDTH
    names: Names = {"pipe": pipe, "tokens": tokens, "targets": targets}
    yield names
    correct = nn.Sequential(*layers)(tokens).argmax(-1) == targets
    assert names["result"].metrics == {"accuracy": float(correct.double().mean())}
    pipe.close()


@contextmanager
def recorded(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """The timeline of a step."""
    del folder
    pipe = _pipeline(mesh)
    yield {"timeline": pipe.step(*_batch(), record=True).timeline}
    pipe.close()


@contextmanager
def measured(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """Layers of a model of ours, a batch and a mesh; afterwards the model is woven by costs of its phases."""
    del folder
    config = ModelConfig.named("tiny")
    tokens = torch.randint(0, config.vocab_size, (8, 9))
    names: Names = {"mesh": init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("pp",))}
    names |= {"layers": CausalLM(config).layers(), "loss": causal_lm_loss}
    names |= {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    yield names
    pipe, (costs,) = names["pipe"], names["costs"]
    phased = {layer for stage in pipe.program.anatomy.layers for layer in stage}
    assert costs.phases.keys() == {f"{layer.name}.{phase.name}" for layer in phased for phase in layer.phases}
    assert costs.woven
    assert pipe.step(names["tokens"], names["targets"]).loss > 0
    pipe.close()


@contextmanager
def choosing(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """Layers of a model of ours, a plan, a batch and a mesh; afterwards the costs have chosen."""
    del folder
    config = ModelConfig.named("tiny")
    tokens = torch.randint(0, config.vocab_size, (8, 9))
    names: Names = {"mesh": init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("pp",))}
    names |= {"layers": CausalLM(config).layers(), "loss": causal_lm_loss}
    names |= {"plan": stretto.schedules.one_f_one_b(devices=mesh.size(), microbatches=4)}
    names |= {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    yield names
    pipe, (costs,) = names["pipe"], names["costs"]
    assert len(costs.activation_bytes) == pipe.program.placement.stages
    assert [stage.why for stage in pipe.memory_choice.stages] == [
        "nothing of it may leave (tensors under min_bytes stay)"
    ] * 2
    assert pipe.step(names["tokens"], names["targets"]).loss > 0
    pipe.close()


@contextmanager
def predicted(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """Costs of the same model."""
    del mesh
    costs = stretto.load_costs(Path(__file__).parent.parent.parent / "examples" / "phases.toml")
    with contextlib.chdir(folder):
        names: Names = {"stretto": stretto, "dist": dist, "costs": [msgspec.structs.replace(costs, reduce=(0.1, 0.2))]}
        yield names
        if dist.get_rank() == 0:
            assert stretto.load_costs("fitted.toml") == names["costs"][0]
            assert len(names["program"].anatomy.layers) == 4


@contextmanager
def failing(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """A pipeline, and a batch that it refuses."""
    pipe, (inputs, targets) = _pipeline(mesh), _batch()
    with contextlib.chdir(folder):
        try:
            yield {"torch": torch, "pipe": pipe, "inputs": inputs[:3], "targets": targets[:3]}
        except stretto.PipelineError:
            saved = torch.load(f"rank-{mesh.get_local_rank()}-after-step-0.pt")
            assert list(saved) == [name for name, _ in pipe.named_parameters()]
        else:
            raise AssertionError("the step was not refused")


@contextmanager
def pushing(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """A pipeline, and a receiver that waits for its weights."""
    live = {name: torch.zeros_like(tensor) for name, tensor in nn.Sequential(*_layers()).state_dict().items()}
    names = {"stretto": stretto, "mesh": mesh, "pipe": _pipeline(mesh)}
    with Receiver(f"unix://{folder}/engine-0/door", into=live) as receiver:
        receiver.start()
        yield names
        _validate_pushed(names)
        assert (live["7.weight"] == names["pipe"].state_dict()["7.weight"]).all()
    names["pipe"].close()


@contextmanager
def pushing_a_model(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """A model."""
    del folder
    names = {"mesh": mesh, "model": nn.Sequential(*_layers())}
    yield names
    _validate_pushed(names)
    names["receiver"].close()


def _validate_pushed(names: Names) -> None:
    assert list(names["report"].receivers.values()) == ["verified"]
    names["sender"].close()


@contextmanager
def sharding(mesh: DeviceMesh, folder: Path) -> Iterator[Names]:
    """A model to shard, and a receiver for it; the process group is there already."""
    live = {name: tensor.bfloat16() for name, tensor in nn.Sequential(*_layers()).state_dict().items()}
    address = f"unix://{folder}/engine-0/door"
    with contextlib.ExitStack() as stack:
        if mesh.get_rank() == 0:
            stack.enter_context(Receiver(address, into=live)).start()
        dist.barrier()
        stack.callback(setattr, dist, "init_process_group", dist.init_process_group)
        dist.init_process_group = lambda: None  # type: ignore[assignment]
        yield {"model": nn.Sequential(*_layers()), "steps": 2, "train": lambda _: None, "addresses": [address]}
        assert (status(address).version, status(address).assurance) == ("step-1", "verified")
        dist.barrier()


GIVEN: dict[str, Callable[[DeviceMesh, Path], AbstractContextManager[Names]]] = {
    given.__name__: given
    for given in (
        training,
        evaluating,
        language_model,
        data_parallel,
        checkpointing,
        own_model,
        trained_model,
        trained_cut_model,
        recorded,
        measured,
        choosing,
        predicted,
        failing,
        pushing,
        pushing_a_model,
        sharding,
    )
}
