"""Test the parts of a served cascade without a cluster: routes as in ``run.serve``, and deaths of processes.
tests/jobs/test_ray.py deploys it."""

import asyncio
import json
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flexhybrid import InputError
from flexhybrid.cascade.loading import load_model
from flexhybrid.cascade.models import ModelOutputs
from flexhybrid.cascade.options import ServeOptions
from flexhybrid.cascade.routes import Cascade, CascadeModel, Skip
from flexhybrid.cascade.serving.answers import Answer, judge, serve
from flexhybrid.cascade.serving.processes import Process, actor_options, processes_of
from flexhybrid.cascade.serving.ray_serve import _answer_all, _cause
from flexhybrid.cascade.serving.router import ASK_AGAIN, LocalRouter, RemoteRouter, Router, Worker, stacked

CASCADE = Cascade(tuple(map(CascadeModel, ("small", "middle", "large"))), (0.9, 0.8), ((Skip(0.6, 2),), ()))


class Toy:
    """A model of two classes, sure if a request's first number is large; it raises for a number below zero."""

    def __init__(self, name: str, sure_from: float):
        self.name, self.sure_from = name, sure_from

    def predict(self, batch) -> ModelOutputs:
        x = np.asarray(batch)[:, 0]
        if (x < 0).any():
            raise RuntimeError("a model that breaks")
        logits = np.stack([np.where(x >= self.sure_from, 9.0, x / 5), np.zeros(len(x))], axis=1)[:, None]
        return ModelOutputs([f"{self.name} {value:g}" for value in x], logits, np.ones((len(x), 1), dtype=bool))


TOYS = [Toy("small", 7.0), Toy("middle", 4.0), Toy("large", 0.0)]
REQUESTS = np.arange(-1, 10, dtype=np.float32)[:, None]


class Handle:
    """A stand-in for a deployment's handle; the first ``deaths`` calls of each request meet a dying replica."""

    def __init__(self, place: int, deaths: int = 0):
        self.place, self.deaths = place, deaths
        self.calls = 0

    async def __call__(self, request):
        from ray.exceptions import RayActorError

        self.calls += 1
        if self.calls % (self.deaths + 1):
            raise RayActorError
        judged = judge(CASCADE, self.place, TOYS[self.place], request[None])
        return judged.outputs[0], float(judged.sure[0]), judged.reasons[0], judged.tokens[0]


def router_of(*holders) -> Router:
    return Router(CASCADE, [[holder] for holder in holders], ServeOptions())


async def all_answers(router: Router) -> list[dict]:
    answers = await asyncio.gather(*(router.answer(request, i) for i, request in enumerate(REQUESTS)))
    return [answer.__dict__ for answer in answers]


def test_the_router_takes_the_routes_of_the_cascade():
    pytest.importorskip("ray")
    expected = [answer.__dict__ for answer in serve(CASCADE, TOYS, REQUESTS)]
    router = router_of(*map(Handle, range(3)))
    assert asyncio.run(all_answers(router)) == expected
    counted = asyncio.run(router.status())
    for i, row in enumerate(counted["models"]):
        name = CASCADE.names[i]
        assert row["visited"] == sum(name in answer["visited"] for answer in expected)
        assert row["answered"] == sum(name == answer["model"] for answer in expected)
    assert counted["under_way"] == 0 and counted["num_requests"] == len(REQUESTS)
    assert {answer["model"] for answer in expected} == {"small", "middle", "large", None}
    assert ["small", "large"] in [answer["visited"] for answer in expected]


def test_a_request_is_retried_if_its_replica_dies_and_passed_on_if_all_do():
    pytest.importorskip("ray")
    router = router_of(Handle(0, ASK_AGAIN - 1), Handle(1), Handle(2))
    answer = asyncio.run(router.answer(REQUESTS[-1], 0))
    assert (answer.model, answer.failed) == ("small", {}) and router.asks[0][0].calls == ASK_AGAIN
    router = router_of(Handle(0, ASK_AGAIN), Handle(1), Handle(2))
    answer = asyncio.run(router.answer(REQUESTS[-1], 0))
    assert (answer.model, list(answer.failed)) == ("middle", ["small"]) and not math.isnan(answer.confidence)


def test_if_the_largest_model_dies_the_surest_smaller_answer_is_given():
    pytest.importorskip("ray")
    router = router_of(Handle(0), Handle(1), Handle(2, ASK_AGAIN))
    answer = asyncio.run(router.answer(np.array([3.0], dtype=np.float32), 5))
    assert (answer.index, answer.model, answer.is_fallback) == (5, "small", True) and answer.confidence < 0.9
    assert answer.failed == {"large": f"{ASK_AGAIN} processes of the model died during the request"}


def raising(error: Exception):
    async def ask(_request):
        raise error

    return ask


def test_an_error_of_ray_serve_passes_a_request_on():
    pytest.importorskip("ray")
    from ray.serve._private.common import DeploymentID
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

    for error in (BackPressureError(5, 4), DeploymentUnavailableError(DeploymentID("small", "cascade"))):
        answer = asyncio.run(router_of(raising(error), Handle(1), Handle(2)).answer(REQUESTS[-1], 0))
        assert answer.model == "middle" and type(error).__name__ in answer.failed["small"]


async def never(_request):
    await asyncio.Event().wait()


def test_a_model_that_does_not_answer_in_time_is_passed_over():
    pytest.importorskip("ray")
    router = router_of(never, Handle(1), Handle(2))
    answer = asyncio.run(router.answer(REQUESTS[-1], 0, patience_s=0.01))
    assert answer.model == "middle" and answer.failed == {"small": "no answer within 0.01 s"}
    assert router.asked == [[0], [0], [0]]


class Hanging(Toy):
    """A model that hangs at a 3 until it is released."""

    def __init__(self):
        super().__init__("small", 7.0)
        self.go = threading.Event()

    def predict(self, batch) -> ModelOutputs:
        if 3.0 in np.asarray(batch):
            self.go.wait()
        return super().predict(batch)


def test_a_hanging_model_fails_its_requests_and_then_its_health_check():
    """A model may continue after all; Serve replaces a process whose model hangs for ever."""
    pytest.importorskip("ray")
    model = Hanging()
    worker = Worker(CASCADE, {0: lambda: model}, {0: 4}, timeout_s=0.05)

    async def life() -> None:
        assert (await worker.ask(0, REQUESTS[-1]))[0] == "small 9"
        worker.check_health()
        assert (await worker.ask(0, np.array([3.0])))[2] == "no answer within 0.05 s"
        assert (await worker.ask(0, REQUESTS[-1]))[2] == "no answer within 0.05 s"  # its thread is not there for it
        while time.monotonic() - worker.since[0] <= 0.05:
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="model small has computed a batch for 0 s"):
            worker.check_health()
        model.go.set()
        while worker.since:
            await asyncio.sleep(0.01)
        worker.check_health()
        assert (await worker.ask(0, REQUESTS[-1]))[0] == "small 9"

    asyncio.run(life())


def test_requests_that_come_while_a_model_computes_are_its_next_batch():
    """The batch has a limit. A cancelled request is not computed, and a single request does not wait."""
    model, sizes, begun, go = Toy("one", 0.0), [], threading.Event(), threading.Event()

    def predict(batch) -> ModelOutputs:
        sizes.append(len(batch))
        begun.set()
        go.wait()
        return Toy.predict(model, batch)

    worker = Worker(CASCADE, {2: lambda: SimpleNamespace(predict=predict)}, {2: 3}, timeout_s=60)

    async def load() -> list[str]:
        first = asyncio.ensure_future(worker.ask(2, REQUESTS[3]))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        others = [asyncio.ensure_future(worker.ask(2, request)) for request in REQUESTS[4:10]]
        await asyncio.sleep(0)
        others.pop(0).cancel()
        go.set()
        return [answer[0] for answer in await asyncio.gather(first, *others)]

    assert asyncio.run(load()) == [f"one {value}" for value in (2, 4, 5, 6, 7, 8)]
    assert sizes == [1, 3, 2] and not worker.at_work


def test_all_models_in_one_process_answer_as_each_in_its_own():
    pytest.importorskip("ray")
    loads = {place: (lambda toy=toy: toy) for place, toy in enumerate(TOYS)}
    router = LocalRouter(CASCADE, loads, dict.fromkeys(loads, 4), ServeOptions())

    async def together() -> list[dict]:
        router.check_health()
        return await all_answers(router)

    expected = [answer.__dict__ for answer in serve(CASCADE, TOYS, REQUESTS)]
    for found, one in zip(asyncio.run(together()), expected, strict=True):
        assert found | {"confidence": None} == one | {"confidence": None}
        assert (found["confidence"] or 0) == pytest.approx(one["confidence"] or 0)


def test_joules_of_each_machine_count_once():
    pytest.importorskip("ray")
    shown = {"a": ("m1", 5.0, "measured: A"), "b": ("m1", 3.0, "measured: A"), "c": ("m2", 4.0, "measured: B")}

    def handle(name: str):
        async def energy():
            return shown[name]

        return SimpleNamespace(ask=SimpleNamespace(remote=energy), energy=SimpleNamespace(remote=energy))

    router = RemoteRouter(CASCADE, [[0], [1], [2]], ServeOptions(), *map(handle, "abc"))
    assert asyncio.run(router.energy()) == (9.0, "measured: A; measured: B, 2 machines")
    shown["c"] = ("m2", None, "not measured: x")
    assert asyncio.run(router.energy()) == (None, "not measured: x (m2)")
    del shown["b"]
    joules, source = asyncio.run(router.energy())
    assert joules is None and source.startswith("not measured: a process did not return")


class Embedded(torch.nn.Module):
    """A model that embeds token ids and answers their sum; torch embeds only whole numbers."""

    def forward(self, x):
        table = torch.arange(40.0).reshape(10, 4).sin()
        return torch.nn.functional.embedding(x, table).sum(dim=1)


class Projected(torch.nn.Module):
    """A matrix product in float32, which accepts no other dtype."""

    def forward(self, x):
        return x @ torch.arange(12.0).reshape(3, 4).cos()


class Posted:
    """A stand-in for an HTTP request."""

    method = "POST"

    def __init__(self, text: str):
        self.text = text

    async def json(self):
        return json.loads(self.text)


def posted(cascade: Cascade, model, text: str) -> tuple[int, dict]:
    """Return status and content of the served cascade's response."""

    async def ask(request):
        outputs, sure, reasons, tokens = judge(cascade, 0, model, stacked([request]))
        return outputs[0], float(sure[0]), reasons[0], tokens[0]

    router = Router(cascade, [[ask]], ServeOptions())
    response = asyncio.run(router(Posted(text)))
    return response.status_code, json.loads(response.body)


@pytest.mark.parametrize(
    ("source", "x", "is_known"),
    [
        ("Embedded", np.array([[1, 2, 9], [0, 0, 3]]), False),
        ("Embedded", np.array([[1, 2, 9], [0, 0, 3]], dtype=np.int32), True),
        ("Projected", np.array([[0.25, 2.0, -1.5]], dtype=np.float32), False),
        ("Projected", np.array([[1, 2, 3]], dtype=np.float32), True),  # JavaScript writes 1.0 as 1
    ],
)
def test_requests_over_http_keep_their_types(source, x, is_known):
    """They are answered like those of a file."""
    pytest.importorskip("ray")
    cascade = Cascade((CascadeModel("one"),), (), x_dtype=str(x.dtype) if is_known else None)
    model = load_model("one", f"{__name__}:{source}", "classification")
    for row, answer in zip(x, serve(cascade, [model], x), strict=True):
        status, content = posted(
            cascade, model, json.dumps({"x": row.tolist()}).replace(".0", "" if is_known else ".0")
        )
        assert status == 200 and content == answer.__dict__ | {"index": 0}


@pytest.mark.parametrize(
    ("cascade", "text", "words"),
    [
        ({"task": "generation"}, '{"prompt": 5}', 'needs a "prompt", a text or a list of token ids'),
        ({"task": "generation"}, '{"prompt": ["a"]}', 'needs a "prompt"'),
        ({"task": "generation"}, '{"prompt": []}', 'needs a "prompt"'),
        ({"task": "generation"}, '{"x": [1]}', 'needs a "prompt"'),
        ({"task": "generation"}, '"prompt"', 'needs a "prompt"'),
        ({}, '{"prompt": "a"}', 'needs an "x" of numbers'),
        ({}, '{"x": ["1"]}', 'needs an "x"'),
        ({}, '{"x": [[1], [1, 2]]}', 'needs an "x"'),
        ({}, '{"x": [1, null]}', 'needs an "x"'),
        ({}, '{"x": []}', 'needs an "x"'),
        ({}, "[1]", 'needs an "x"'),
        ({}, '{"text": 5}', '"text" must be a text, or a list of two'),
        ({}, "{", "no request"),
        ({"x_dtype": "int64"}, '{"x": [1.5]}', "of the type int64"),
        ({"x_dtype": "uint8"}, '{"x": [300]}', "of the type uint8"),
        ({"x_dtype": "float16"}, '{"x": [1e9]}', "of the type float16"),
    ],
)
def test_a_body_that_is_no_request_is_the_client_s_mistake(cascade, text, words):
    pytest.importorskip("ray")
    status, content = posted(Cascade((CascadeModel("one"),), (), **cascade), None, text)
    assert status == 400 and words in content["error"]


def test_requests_beyond_the_queue_are_refused_with_retry_after():
    pytest.importorskip("ray")
    waiting = asyncio.Event()

    async def ask(_request):
        await waiting.wait()
        return 1, 0.99, None, 1

    router = Router(Cascade((CascadeModel("one"),), ()), [[ask]], ServeOptions(queue=2))
    get = SimpleNamespace(method="GET")

    async def load() -> list:
        body = '{"x": [1.0]}'
        under_way = [asyncio.ensure_future(router(Posted(body))) for _ in range(2)]
        await asyncio.sleep(0)
        refused = await router(Posted(body))
        status = json.loads((await router(get)).body)  # asked even then
        assert status["under_way"] == 2 and status["num_requests"] == 0
        waiting.set()
        return [refused, *await asyncio.gather(*under_way), await router(Posted(body)), await router(Posted("{"))]

    refused, *taken, broken = asyncio.run(load())
    assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
    assert "2 requests are under way" in json.loads(refused.body)["error"]
    assert [response.status_code for response in taken] == [200] * 3 and broken.status_code == 400
    assert router.under_way == 0
    for options, words in (({"queue": 0}, "--queue"), ({"timeout_s": 0.0}, "--timeout-s"), ({"route": "x"}, "--route")):
        with pytest.raises(InputError, match=words):
            ServeOptions(**options)


class DyingRouter:
    """A stand-in for the router's handle: request i is answered at the i-th attempt."""

    def __init__(self, times: list[int]):
        self.times, self.answer, self.asked = times, self, []

    def remote(self, request, index: int):
        from ray.exceptions import RayActorError

        def result():
            if self.asked.count(index) < self.times[request]:
                raise RayActorError
            return Answer(index, request)

        self.asked.append(index)
        return SimpleNamespace(result=result)


def test_no_request_of_a_file_is_lost_if_a_router_dies():
    pytest.importorskip("ray")
    router = DyingRouter([1, 3, 1, 2])
    assert [(one.index, one.output) for one in _answer_all(router, range(4), 10)] == [(10 + i, i) for i in range(4)]
    assert sorted(router.asked) == [10, 11, 11, 11, 12, 13, 13]  # none more often than it must
    with pytest.raises(InputError, match="router of the cascade died"):
        _answer_all(DyingRouter([1, ASK_AGAIN + 1]), range(2), 0)


def plan(**changes) -> dict:
    """Return a plan as ``flexhybrid cascade plan`` writes it; small and large share GPU a."""
    model = {"replicas": 1, "partitions": 1, "batch": 4, "gpus": [["a"]]}
    models = [
        {**model, "name": "small", "replicas": 2, "gpus": [["a"], ["b"]]},
        {**model, "name": "middle", "replicas": 0, "gpus": []},
        {**model, "name": "large", "batch": 2} | changes,
    ]
    gpus = [{"name": "a", "host": "h0"}, {"name": "b", "host": "h1"}, {"name": "c", "host": "h1"}]
    return {"models": models, "gpus": gpus}


PLANNED = [Process("a", {0: 4, 2: 2}, 1.0, "h0"), Process("b", {0: 4}, 1.0, "h1"), Process("middle", {1: 64}, 0.0)]


def test_a_planned_gpu_is_a_process_with_the_models_that_share_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan()))
    assert processes_of(CASCADE, path) == PLANNED
    for record, words in (
        (plan(partitions=2), "2 partitions"),
        (plan(name="huge"), "'large' is missing"),
        ({"models": 3}, "no plan of the cascade"),
    ):
        path.write_text(json.dumps(record))
        with pytest.raises(InputError, match=words):
            processes_of(CASCADE, path)


def test_language_models_that_share_a_gpu_have_the_plan_s_parts_of_its_memory(tmp_path):
    language = Cascade(CASCADE.models, CASCADE.thresholds, task="generation")
    record = plan()
    for model, size in zip(record["models"], (2e9, 1e9, 6e9)):
        model["memory_bytes"] = size
    for gpu in record["gpus"]:
        gpu["memory_bytes"] = 16_000_000_000
    (tmp_path / "plan.json").write_text(json.dumps(record))
    parts = [process.memory for process in processes_of(language, tmp_path / "plan.json")]
    assert parts == [{0: 4_000_000_000, 2: 12_000_000_000}, {}, {}]  # one that is alone takes what is free


def test_without_a_plan_models_share_a_process_where_they_may():
    whole = [Process("all", {0: 64, 1: 64, 2: 64})]
    apart = [Process(name, {place: 64}) for place, name in enumerate(CASCADE.names)]
    assert processes_of(CASCADE, None) == whole and processes_of(CASCADE, None, isolate=True) == apart
    language = Cascade(CASCADE.models, CASCADE.thresholds, task="generation")  # each plans the memory it finds free
    assert processes_of(language, None) == apart


def given(processes, free: dict, machines: dict | None = None) -> list[tuple]:
    options = actor_options(processes, free, machines or {})
    return [(one["num_cpus"], one["num_gpus"], one["resources"]) for one in options]


def test_processes_share_what_the_cluster_has_free():
    two = [Process("a", {0: 1}), Process("b", {1: 1})]
    assert given(two, {"CPU": 2.0}) == [(0.66, 0.0, {})] * 2
    assert given(two * 2, {"CPU": 16.0, "GPU": 1.0}) == [(1.0, 0.25, {})] * 4  # whole ones would wait for ever
    # planned hosts are machines that have as many GPUs; a model that the plan leaves out takes none
    machines = {"node:1": 1.0, "node:2": 4.0}
    assert given(PLANNED, {"CPU": 8.0, "GPU": 5.0}, machines) == [
        (1.0, 1.0, {"node:2": 0.001}),
        (1.0, 1.0, {"node:1": 0.001}),
        (1.0, 0.0, {}),
    ]
    three = [Process(name, {0: 1}, 1.0, host) for name, host in (("a", "h0"), ("b", "h1"), ("c", "h1"))]
    pins = [pin for _, _, pin in given(three, {"CPU": 8.0, "GPU": 5.0}, machines)]
    assert pins == [{"node:1": 0.001}, {"node:2": 0.001}, {"node:2": 0.001}]
    assert given(three, {"CPU": 8.0}) == [(1.0, 0.0, {})] * 3  # no GPUs: anywhere
    with pytest.raises(InputError, match="needs 2 GPUs, and the Ray cluster has 1 free"):
        given(PLANNED, {"CPU": 8.0, "GPU": 1.0}, machines)
    with pytest.raises(InputError, match="h1 of the plan needs a machine with 2 GPUs, but of the .* 3 .* one with 1"):
        given(three, {"CPU": 8.0, "GPU": 3.0}, dict.fromkeys(("node:1", "node:2", "node:3"), 1.0))
    with pytest.raises(InputError, match="h1 of the plan needs a machine with 1 GPUs, .* none left"):
        given(PLANNED, {"CPU": 8.0, "GPU": 2.0}, {"node:1": 2.0})


def test_a_failed_deployment_is_reported_with_its_cause():
    told = (
        "Deploying application cascade failed: Failed to update the deployments ['a'].\n"
        'Traceback (most recent call last):\n  File "x.py", line 1, in __init__\n'
        "flexhybrid.core.errors.InputError: cannot read a.pt2 of model a: no such file\n\n"
    )
    assert _cause(RuntimeError(told)).endswith("cannot read a.pt2 of model a: no such file")
    assert _cause(RuntimeError("it would not")) == "it would not"
