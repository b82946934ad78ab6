"""The served cascade's parts, without a cluster: the router goes the ways of ``run.serve``, replicas' deaths included.

tests/jobs/test_ray.py deploys it.
"""

import asyncio
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flexhybrid import InputError
from flexhybrid.cascade.models import ModelOutputs, load_model
from flexhybrid.cascade.routes import Cascade, CascadeModel, Skip
from flexhybrid.cascade.serving.answers import Answer, judge, serve
from flexhybrid.cascade.serving.ray_serve import (
    ASK_AGAIN,
    Router,
    Size,
    _answer_all,
    _cause,
    _stacked,
    shared_out,
    sizes_of,
)

CASCADE = Cascade(tuple(map(CascadeModel, ("small", "middle", "large"))), (0.9, 0.8), ((Skip(0.6, 2),), ()))


class Toy:
    """A model of two classes, sure where a request's first number is large; it breaks at one below zero."""

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
    """In the place of a deployment's handle; the first ``deaths`` calls of every request meet a dying replica."""

    def __init__(self, place: int, deaths: int = 0):
        self.place, self.deaths, self.ask = place, deaths, self
        self.calls = 0

    async def remote(self, request):
        from ray.exceptions import RayActorError

        self.calls += 1
        if self.calls % (self.deaths + 1):
            raise RayActorError
        judged = judge(CASCADE, self.place, TOYS[self.place], request[None])
        return judged.outputs[0], float(judged.sure[0]), judged.reasons[0]


def routed(*deaths: int) -> list[dict]:
    router = Router(CASCADE, *(Handle(place, count) for place, count in enumerate(deaths)))

    async def all_answers():
        return await asyncio.gather(*(router.answer(request, i) for i, request in enumerate(REQUESTS)))

    return [answer.__dict__ for answer in asyncio.run(all_answers())]


def test_the_router_goes_the_ways_of_the_cascade():
    pytest.importorskip("ray")
    expected = [answer.__dict__ for answer in serve(CASCADE, TOYS, REQUESTS)]
    assert routed(0, 0, 0) == expected
    assert {answer["model"] for answer in expected} == {"small", "middle", "large", None}
    assert ["small", "large"] in [answer["visited"] for answer in expected]


def test_a_request_is_asked_again_where_its_replica_dies_and_goes_on_where_all_do():
    pytest.importorskip("ray")
    router = Router(CASCADE, Handle(0, ASK_AGAIN - 1), Handle(1), Handle(2))
    answer = asyncio.run(router.answer(REQUESTS[-1], 0))
    assert (answer.model, answer.failed) == ("small", {}) and router.asks[0].__self__.calls == ASK_AGAIN
    router = Router(CASCADE, Handle(0, ASK_AGAIN), Handle(1), Handle(2))
    answer = asyncio.run(router.answer(REQUESTS[-1], 0))
    assert (answer.model, list(answer.failed)) == ("middle", ["small"]) and not math.isnan(answer.confidence)


def test_a_request_whose_largest_model_dies_has_the_surest_smaller_answer():
    pytest.importorskip("ray")
    router = Router(CASCADE, Handle(0), Handle(1), Handle(2, ASK_AGAIN))
    answer = asyncio.run(router.answer(np.array([3.0], dtype=np.float32), 5))
    assert (answer.index, answer.model, answer.is_fallback) == (5, "small", True) and answer.confidence < 0.9
    assert answer.failed == {"large": f"{ASK_AGAIN} of its replicas died of it"}


class Embedded(torch.nn.Module):
    """Looks token ids up, and answers the sum; torch takes whole numbers alone for that."""

    def forward(self, x):
        table = torch.arange(40.0).reshape(10, 4).sin()
        return torch.nn.functional.embedding(x, table).sum(dim=1)


class Projected(torch.nn.Module):
    """A matrix product in float32, which takes no other type."""

    def forward(self, x):
        return x @ torch.arange(12.0).reshape(3, 4).cos()


def embedded() -> Embedded:
    return Embedded()


def projected() -> Projected:
    return Projected()


class Posted:
    """In the place of an HTTP request."""

    def __init__(self, text: str):
        self.text = text

    async def json(self):
        return json.loads(self.text)


def posted(cascade: Cascade, model, text: str) -> tuple[int, dict]:
    """Status and content of the served cascade's response."""

    async def remote(request):
        outputs, sure, reasons = judge(cascade, 0, model, _stacked([request]))
        return outputs[0], float(sure[0]), reasons[0]

    router = Router(cascade, SimpleNamespace(ask=SimpleNamespace(remote=remote)))
    response = asyncio.run(router(Posted(text)))
    return response.status_code, json.loads(response.body)


@pytest.mark.parametrize(
    ("source", "x", "is_known"),
    [
        ("embedded", np.array([[1, 2, 9], [0, 0, 3]]), False),
        ("embedded", np.array([[1, 2, 9], [0, 0, 3]], dtype=np.int32), True),
        ("projected", np.array([[0.25, 2.0, -1.5]], dtype=np.float32), False),
        ("projected", np.array([[1, 2, 3]], dtype=np.float32), True),  # JavaScript writes 1.0 as 1
    ],
)
def test_requests_over_http_keep_their_types(source, x, is_known):
    """They are answered as those of a file."""
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


class DyingRouter:
    """In the place of the router's handle: request i is answered at the i-th time that it is asked."""

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


def test_a_router_that_dies_takes_no_request_of_a_file_along():
    pytest.importorskip("ray")
    router = DyingRouter([1, 3, 1, 2])
    assert [(one.index, one.output) for one in _answer_all(router, range(4), 10)] == [(10 + i, i) for i in range(4)]
    assert sorted(router.asked) == [10, 11, 11, 11, 12, 13, 13]  # none more often than it must
    with pytest.raises(InputError, match="router of the cascade died"):
        _answer_all(DyingRouter([1, ASK_AGAIN + 1]), range(2), 0)


def plan(**changes) -> dict:
    """As ``flexhybrid cascade plan`` writes it; small and large share GPU a."""
    model = {"replicas": 1, "partitions": 1, "batch": 4, "gpus": [["a"]]}
    models = [
        {**model, "name": "small", "replicas": 2, "gpus": [["a"], ["b"]]},
        {**model, "name": "middle", "replicas": 0, "gpus": []},
        {**model, "name": "large"} | changes,
    ]
    gpus = [{"name": "a", "holds": ["small replica 0", "large"]}, {"name": "b", "holds": ["small replica 1"]}]
    return {"models": models, "gpus": gpus}


def test_a_plan_says_how_models_are_deployed(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan()))
    assert sizes_of(CASCADE, path) == [Size(2, 4, 0.5), Size(1, 4, 1.0), Size(1, 4, 0.5)]
    assert sizes_of(CASCADE, None) == [Size()] * 3
    for record, words in ((plan(partitions=2), "2 partitions"), (plan(name="huge"), "'large' is missing")):
        path.write_text(json.dumps(record))
        with pytest.raises(InputError, match=words):
            sizes_of(CASCADE, path)


def test_replicas_share_what_the_cluster_has_free():
    assert shared_out([Size(), Size(2)], {"CPU": 2.0}) == (0.5, [0.0, 0.0])
    assert shared_out([Size()] * 4, {"CPU": 16.0, "GPU": 1.0}) == (1.0, [0.25] * 4)  # whole ones would wait for ever
    assert shared_out([Size(2, 4, 0.5), Size(1, 4, 1.0)], {"CPU": 8.0, "GPU": 2.0}) == (1.0, [0.5, 1.0])
    with pytest.raises(InputError, match="need 2 GPUs, and the Ray cluster has 1 free"):
        shared_out([Size(2, 4, 0.5), Size(1, 4, 1.0)], {"CPU": 8.0, "GPU": 1.0})


def test_a_failed_deployment_says_why():
    told = (
        "Deploying application cascade failed: Failed to update the deployments ['a'].\n"
        'Traceback (most recent call last):\n  File "x.py", line 1, in __init__\n'
        "flexhybrid.core.errors.InputError: cannot read a.pt2 of model a: no such file\n\n"
    )
    assert _cause(RuntimeError(told)).endswith("cannot read a.pt2 of model a: no such file")
    assert _cause(RuntimeError("it would not")) == "it would not"
