"""Pushes into a real vLLM on the CPU: `make test-vllm`, in an environment of its own, not a part of `make test`."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedModel

import stretto
from ranks import Ranks
from stretto.ir.errors import WeightsError
from stretto.schedules import dualpipe
from stretto.weights import Export, Hooks, Receiver, Sender, status
from stretto.weights.adapters.vllm import VllmServer
from stretto.weights.messages import InFlight

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,  # vLLM pads it
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": None,
    "initializer_range": 0.1,  # so that models say different things
}
PROMPT = [5, 17, 99, 3, 250, 42] * 4
KNOWN = [it % 30 for it in PROMPT]  # words that all models here have
BUCKET = 350_208  # a little more than the largest tensor
STARTING, ANSWERING = 300.0, 120.0
State = dict[str, Tensor]


def llama(seed: int, **more: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, tie_word_embeddings=False) if not more else LlamaConfig(**SIZES | more)
    )


def mixtral(seed: int) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(**SIZES, tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2)
    )


@cache
def model_of(seed: int) -> LlamaForCausalLM:
    return llama(seed).float().eval()


def greedy(model: PreTrainedModel, prompt: list[int], count: int = 6) -> list[int]:
    """What Hugging Face's model says."""
    found, given, past = list[int](), prompt, None
    with torch.no_grad():
        for _ in range(count):
            out = model(torch.tensor([given]), past_key_values=past, use_cache=True)
            given, past = [int(out.logits[0, -1].argmax())], out.past_key_values
            found += given
    return found


def state(seed: int, **changed: Tensor | None) -> State:
    """A model's tensors; those of `changed` are others, or are not there."""
    found: dict[str, Tensor | None] = dict(model_of(seed).state_dict()) | changed
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def completed(server: VllmServer, prompt: list[int], count: int) -> list[int]:
    """What vLLM says."""
    body = {"model": "m", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    said = server.post("/v1/completions", body | {"return_token_ids": True}, seconds=ANSWERING)
    found: list[int] = said["choices"][0]["token_ids"]
    return found


class Engine:
    """vLLM's server, in processes of its own."""

    def __init__(self, folder: Path, model: Path, *, workers: int = 1, dtype: str = "float32") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.workers = f"http://127.0.0.1:{port}", workers
        self._doors = folder / f"doors-{port}"
        self._doors.mkdir(mode=0o700)
        self._log = folder / f"vllm-{port}.log"
        options = {
            "model": str(model),
            "served-model-name": "m",
            "dtype": dtype,
            "max-model-len": "512",
            "block-size": "32",
            "kv-cache-memory-bytes": "67108864",
            "weight-transfer-config": '{"backend": "stretto"}',
            "port": str(port),
            "tensor-parallel-size": str(workers),
        }
        flags = [it for name, value in options.items() for it in (f"--{name}", value)]
        environment = os.environ | {
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1" if workers == 2 else "0-1",
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm.entrypoints.openai.api_server",
                    "--enforce-eager",
                    "--skip-tokenizer-init",
                    *flags,
                ],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.server = VllmServer(self.url, address=self._address("{rank}"))

    def _address(self, rank: str) -> str:
        return f"unix://{self._doors}/cpu-{rank}"

    def wait(self) -> "Engine":
        deadline = time.monotonic() + STARTING
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                break
            assert self._process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.5)
        self.tokens(KNOWN)  # the first take long
        self.server.init()
        return self

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log(self) -> str:
        return self._log.read_text()[-4000:]

    @property
    def addresses(self) -> list[str]:
        return [self._address(str(rank)) for rank in range(self.workers)]

    def endpoints(self) -> list[Any]:
        """For a sender alone: the server is asked through the first worker."""
        return [self.server.endpoint("cpu", rank=0), *self.addresses[1:]]

    def tokens(self, prompt: list[int], count: int = 6) -> list[int]:
        return completed(self.server, prompt, count)

    def is_paused(self) -> bool:
        return bool(self.server.get("/is_paused", seconds=10)["is_paused"])

    def measured(self, name: str) -> float:
        """One of its metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            found = re.search(rf"^vllm:{name}\S* (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None, f"vLLM tells no {name}"
        return float(found[1])


@dataclass
class Pushing:
    engine: Engine
    sender: Sender
    endpoints: list[Any]

    def __call__(self, version: str, tensors: State, in_flight: InFlight = "wait") -> str:
        """How sure it is."""
        self.sender.register(version, tensors)
        report = self.sender.push(version, self.endpoints, in_flight=in_flight)
        assert set(report.receivers) == {str(it) if isinstance(it, str) else it.name for it in self.endpoints}
        (sure,) = set(report.receivers.values())
        return sure

    def serves(self, seed: int) -> bool:
        return self.engine.tokens(PROMPT) == greedy(model_of(seed), PROMPT)


@contextlib.contextmanager
def pushing(engine: Engine) -> Iterator[Pushing]:
    with Sender(device="cpu", timeout=60.0, bucket_bytes=BUCKET) as sender:
        made = Pushing(engine, sender, engine.endpoints())
        yield made
        made.endpoints[0].close()


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A short name, for sockets."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


@pytest.fixture(scope="session", params=[1, 2], ids=["one worker", "two workers"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    model = folder / "llama-0"
    model_of(0).save_pretrained(model)
    made = Engine(folder, model, workers=request.param)
    try:
        made.wait()
        assert made.tokens(PROMPT) == greedy(model_of(0), PROMPT)
        yield made
    finally:
        made.stop()


@pytest.fixture
def push(engine: Engine) -> Iterator[Pushing]:
    with pushing(engine) as made:
        yield made


def test_tokens_after_a_push_are_those_of_its_weights(push: Pushing) -> None:
    for version, seed in (("one", 1), ("two", 2), ("one again", 1)):
        assert push(version, state(seed)) == "delivered"
        assert push.serves(seed)
        assert push.engine.server.version() == version
        assert {status(it).version for it in push.engine.addresses} == {version}


def test_another_type_is_cast(push: Pushing) -> None:
    half = {name: tensor.bfloat16() for name, tensor in state(3).items()}
    assert push("half", half) == "delivered"
    rounded = llama(3).bfloat16().float().eval()
    assert push.engine.tokens(PROMPT) == greedy(rounded, PROMPT)


Q, K, DOWN, NORM = (
    f"model.layers.{it}.weight"
    for it in ("0.self_attn.q_proj", "0.self_attn.k_proj", "1.mlp.down_proj", "0.input_layernorm")
)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (Q, (320, 256)),
        (Q, (192, 256)),
        (K, (130, 256)),
        (DOWN, (256, 100)),
        (DOWN, (128, 256)),  # turned round
        (NORM, (32,)),
        ("lm_head.weight", (310, 256)),
    ],
)
def test_a_wrong_shape_is_refused_before_anybody_pauses(push: Pushing, name: str, shape: tuple[int, ...]) -> None:
    push("two", state(2))
    with pytest.raises(WeightsError, match=f"{name} is pushed with shape"):
        push("wrong", state(1, **{name: torch.zeros(shape)}))
    assert not push.engine.is_paused()
    assert push.serves(2)
    assert push.engine.server.version() == "two"
    push("one", state(1))
    assert push.serves(1)


@pytest.mark.parametrize("name", [Q, DOWN, NORM, "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"])
def test_what_is_missing_fails_the_push_and_the_next_repairs_it(push: Pushing, name: str) -> None:
    push("two", state(2))
    with pytest.raises(WeightsError, match=r"got 0 of its|got \d+ of its") as found:
        push("wrong", state(1, **{name: None}))
    assert "qkv_proj" in str(found.value) or name.removesuffix(".weight") in str(found.value)
    assert push.engine.is_paused()  # rather than serve a mixture
    assert push("three", state(3)) == "delivered"
    assert push.serves(3)
    assert push.engine.server.version() == "three"


def test_integers_are_refused_before_anybody_pauses(push: Pushing) -> None:
    push("two", state(2))
    with pytest.raises(WeightsError, match="is pushed as int8, and vLLM's model has floating point there"):
        push("wrong", {name: (100 * tensor).to(torch.int8) for name, tensor in state(1).items()})
    assert push.serves(2)


ODD = "model.layers.0.self_attn.odd.weight"


def test_a_name_that_vllm_does_not_know_fails_the_push_and_the_next_repairs_it(push: Pushing) -> None:
    push("two", state(2))
    with pytest.raises(WeightsError, match="odd"):
        push("wrong", state(1) | {ODD: torch.zeros(4)})
    assert push.engine.is_paused()
    push("three", state(3))
    assert push.serves(3)


def test_an_engine_with_mixed_weights_is_not_resumed_by_a_push_that_comes_to_nothing(
    push: Pushing,
) -> None:
    """Though a new sender knows nothing of the one that failed."""

    def cannot(_: InFlight) -> None:
        raise RuntimeError("it cannot pause")

    push("two", state(2))
    with pytest.raises(WeightsError, match="odd"):
        push("wrong", state(1) | {ODD: torch.zeros(4)})
    other = f"unix://{push.engine.addresses[0].removeprefix('unix://')}-other"
    with Receiver(other, into=state(1), hooks=Hooks(pause=cannot)).start(), pushing(push.engine) as again:
        again.sender.register("three", state(3))
        with pytest.raises(WeightsError, match="it cannot pause"):
            again.sender.push("three", [*again.endpoints, other])
        assert push.engine.is_paused()
        assert again("three", state(3)) == "delivered"
        assert again.serves(3)


def _die(endpoints: list[str], url: str, address: str) -> None:
    """A sender that is killed when the first bucket is loaded."""
    server = VllmServer(url, address=address)
    sender = Sender(device="cpu", bucket_bytes=BUCKET)
    sender.register("killed", state(1))
    sender.push(
        "killed",
        [server.endpoint("cpu", rank=0), *endpoints[1:]],
        progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL),
    )


def test_a_sender_that_is_killed(push: Pushing) -> None:
    push("two", state(2))
    push.sender.close()
    engine = push.engine
    process = multiprocessing.get_context("spawn").Process(
        target=_die, args=(engine.addresses, engine.url, engine._address("{rank}"))
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert engine.is_paused()
    with pushing(engine) as again:
        assert again("three", state(3)) == "delivered"
        assert again.serves(3)


def test_a_worker_that_is_forgotten_is_named(push: Pushing) -> None:
    if push.engine.workers == 1:
        pytest.skip("there is one")
    push("two", state(2))
    push.endpoints, every = push.endpoints[:1], push.endpoints
    with pytest.raises(WeightsError, match="worker 1 got no wrong"):
        push("wrong", state(1))
    push.endpoints = every
    push("three", state(3))
    assert push.serves(3)


def test_a_second_init_keeps_what_is_served(push: Pushing) -> None:
    push("two", state(2))
    push.engine.server.init()
    assert {status(it).version for it in push.engine.addresses} == {"two"}
    push.endpoints[0].close()
    push.endpoints = push.engine.endpoints()
    push("three", state(3))
    assert push.serves(3)


LONG = 400


@contextlib.contextmanager
def asked(engine: Engine, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Generations that are under way; what they said, in the end."""
    said: list[list[int]] = [[] for _ in prompts]

    def ask(place: int) -> None:
        said[place] = engine.tokens(prompts[place], LONG)

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(prompts))]
    before = engine.measured("generation_tokens_total")
    for thread in threads:
        thread.start()
    while engine.measured("generation_tokens_total") < before + 10 * len(prompts):
        assert any(thread.is_alive() for thread in threads), "all was said before it could be seen"
    yield said
    for thread in threads:
        thread.join(ANSWERING)
        assert not thread.is_alive()


PROMPTS = [[k, *PROMPT] for k in range(10, 14)]


TRIES = 5


def under_way(push: Pushing, in_flight: InFlight, is_cut: Callable[[list[int], list[int]], bool]) -> list[list[int]]:
    """What is said while model 1 becomes model 2; on a busy machine all may be said before the push begins, and then it
    is asked again. `is_cut` is of what was said and what model 1 would have said.
    """
    old = [greedy(model_of(1), prompt, LONG) for prompt in PROMPTS]
    for _ in range(TRIES):
        push("one", state(1))
        push.sender.register("two", state(2))
        with asked(push.engine, PROMPTS) as said:
            push.sender.push("two", push.endpoints, in_flight=in_flight)
        assert push.serves(2)
        if any(map(is_cut, said, old)):
            return said
    raise AssertionError(f"all was said before the push began, {TRIES} times")


def test_generations_that_are_waited_for_end_with_the_old_weights(push: Pushing) -> None:
    said = under_way(push, "wait", lambda *_: True)
    assert said == [greedy(model_of(1), prompt, LONG) for prompt in PROMPTS]


def test_generations_that_are_aborted_end_early_with_the_old_weights(push: Pushing) -> None:
    said = under_way(push, "abort", lambda it, old: len(it) < len(old))
    for prompt, it in zip(PROMPTS, said, strict=True):
        assert it == greedy(model_of(1), prompt, len(it))


def test_generations_that_are_kept_go_on_with_the_new_weights_alone(push: Pushing) -> None:
    """Nothing of the old weights is in what they say after the push: what was computed before is computed again."""
    said = under_way(push, "keep", lambda it, old: it != old)
    for prompt, it in zip(PROMPTS, said, strict=True):
        assert len(it) == LONG
        old = greedy(model_of(1), prompt, LONG)
        cut = next(k for k in range(LONG + 1) if k == LONG or it[k] != old[k])
        assert cut > 0
        # Some of the last tokens that agree may have been said by the new weights.
        assert any(it[k:] == greedy(model_of(2), prompt + it[:k], LONG - k) for k in range(cut, max(0, cut - 3), -1))


def test_prefixes_cached_with_the_old_weights_are_not_used(push: Pushing) -> None:
    prefix = [(7 * k) % 290 for k in range(128)]
    push("one", state(1))
    before = push.engine.measured("prefix_cache_hits_total")
    assert push.engine.tokens([*prefix, 1]) == greedy(model_of(1), [*prefix, 1])
    assert push.engine.tokens([*prefix, 2]) == greedy(model_of(1), [*prefix, 2])
    assert push.engine.measured("prefix_cache_hits_total") >= before + 96, (
        "the prefix was not cached, so nothing can be told"
    )
    push("two", state(2))
    for last in (1, 2, 3):
        assert push.engine.tokens([*prefix, last]) == greedy(model_of(2), [*prefix, last])


class Words(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.embed_tokens(tokens)
        return found


class Block(nn.Module):
    def __init__(self, model: LlamaForCausalLM, number: int) -> None:
        super().__init__()
        self.layer, self.rotary = model.model.layers[number], model.model.rotary_emb

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        found = self.layer(x, position_embeddings=self.rotary(x, places), position_ids=places)
        return found if isinstance(found, Tensor) else found[0]


class Head(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.lm_head(self.norm(x))
        return found


def exported(name: str) -> str:
    """As Hugging Face has it: 0.embed_tokens…, 1.layer…, 3.lm_head…"""
    number, rest = name.split(".", 1)
    if rest.startswith("layer."):
        return f"model.layers.{int(number) - 1}.{rest.removeprefix('layer.')}"
    return rest if rest.startswith("lm_head") else f"model.{rest}"


ROUNDS = 10


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _learn(mesh: DeviceMesh, addresses: list[str], url: str, address: str) -> list[bool]:
    """Generate, train on what was said, push; whether the engine says after each push what its weights do."""
    torch.set_num_threads(1)
    model, judge = llama(0).float(), llama(0).float().eval()
    parts = [Words(model), *(Block(model, k) for k in range(SIZES["num_hidden_layers"])), Head(model)]
    server, rank = VllmServer(url, address=address), dist.get_rank()
    mine: list[Any] = [server.endpoint("cpu", rank=0), *addresses[1:]] if rank == 0 else addresses[1:]
    right = []
    with contextlib.ExitStack() as stack:
        plan = dualpipe(devices=2, microbatches=4)
        pipe = stack.enter_context(contextlib.closing(stretto.Pipeline(parts, plan=plan, loss=loss, mesh=mesh)))
        sender = stack.enter_context(Sender(mesh, device="cpu", bucket_bytes=BUCKET))
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for number in range(ROUNDS):
            starts = [7 * k + number for k in range(8)]
            said = [[it, *completed(server, [it], 16)] if rank == 0 else [] for it in starts]
            dist.broadcast_object_list(said)
            tokens = torch.tensor(said)
            pipe.step(tokens[:, :-1], (tokens[:, :-1] + 1) % 300)  # as if counting on were rewarded
            optimizer.step()
            optimizer.zero_grad()
            sender.register(f"round-{number}", Export(rename=exported)(pipe))
            sender.push(f"round-{number}", mine)
            everybodys: list[Any] = [None] * mesh.size()
            dist.all_gather_object(everybodys, {exported(name): it for name, it in pipe.state_dict().items()})
            judge.load_state_dict({name: it for ones in everybodys for name, it in ones.items()})
            if rank == 0:
                is_right = completed(server, PROMPT, 6) == greedy(judge, PROMPT)
                right.append(is_right and server.version() == f"round-{number}")
        if rank == 0:
            mine[0].close()
    return right


def test_ten_pushes_from_a_pipeline_that_trains_on_what_the_engine_says(engine: Engine) -> None:
    ranks = Ranks(2)
    try:
        found = ranks.run(_learn, 2, engine.addresses, engine.url, engine._address("{rank}"), timeout=400)
    finally:
        ranks.stop()
    assert found[0] == [True] * ROUNDS


def quantized(folder: Path, model: LlamaForCausalLM) -> None:
    """In 8-bit integers, as llm-compressor writes them."""
    model.bfloat16().save_pretrained(folder)
    found: State = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            found[name] = (tensor.float() / scale).round().to(torch.int8)
            found[f"{name}_scale"] = scale.bfloat16()
        else:
            found[name] = tensor.contiguous()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = weights | {"strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def small(seed: int) -> LlamaForCausalLM:
    """So few words that the second of two workers has none."""
    return llama(seed, vocab_size=30, tie_word_embeddings=False)


KINDS: dict[str, tuple[str, Callable[[Path, int], None]]] = {
    "tied": ("float32", lambda folder, seed: llama(seed, tie_word_embeddings=True).float().save_pretrained(folder)),
    "experts": ("float32", lambda folder, seed: mixtral(seed).float().save_pretrained(folder)),
    "few words": ("float32", lambda folder, seed: small(seed).float().save_pretrained(folder)),
    "quantized": ("bfloat16", lambda folder, seed: quantized(folder, llama(seed))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_models_say_what_a_fresh_engine_says(kind: str, folder: Path) -> None:
    dtype, write = KINDS[kind]
    folders = [folder / f"{kind}-{seed}" for seed in (1, 2)]
    said, files = [], []
    for seed, there in zip((1, 2), folders, strict=True):
        write(there, seed)
        files.append({name: it for file in there.glob("*.safetensors") for name, it in load_file(file).items()})
    for there in reversed(folders):
        engine = Engine(folder, there, dtype=dtype, workers=2 if kind == "few words" else 1)
        try:
            engine.wait()
            said.append(engine.tokens(KNOWN, 12))
            if there is folders[0]:
                with pushing(engine) as push:
                    assert said[0] != said[1], "both say the same, so nothing can be told"
                    for version in (1, 0, 1):
                        assert push(f"{kind} {version}", files[version]) == "delivered"
                        assert engine.tokens(KNOWN, 12) == said[1 - version]
                    name = next(it for it in files[0] if "layers.1" in it and ("down_proj" in it or "w2" in it))
                    with pytest.raises(WeightsError, match="elements"):
                        push("wrong", {it: files[0][it] for it in files[0] if it != name})
                    assert push(f"{kind} again", files[0]) == "delivered"
                    assert engine.tokens(KNOWN, 12) == said[1]
        finally:
            engine.stop()
