"""Test --engine ray: the page's command writes the same file as the local engine, even if an actor is killed."""

import functools
import io
import json
import os
import shlex
import signal
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import warm_python
from forced_machine import ATTENTION
from test_docs import COMMAND, MACHINE, ROOT

from flexhybrid import LLM, InputError, cli
from flexhybrid.cascade.routes import Cascade, CascadeModel
from flexhybrid.cascade.serving import ray_serve
from flexhybrid.core.policy import Policy
from flexhybrid.jobs import ray_cluster
from flexhybrid.jobs.ray_cluster import replicas_of
from flexhybrid.jobs.run import job as run_module
from flexhybrid.jobs.run import opening

pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)  # seconds, on a machine with much else to do


@pytest.fixture(scope="module")
def two_cpus(tmp_path_factory):
    """Start a small cluster in this process, which commands find connected; its workers serve the next test too."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        warm_python.ray_workers(patch, tmp_path_factory.mktemp("ray"))
        patch.setenv("RAY_idle_worker_killing_time_threshold_ms", "600000")
        ray_cluster.start_local(ray, num_cpus=2, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.fixture
def run(tiny, tmp_path, monkeypatch):
    """Run the command on a tiny model with four requests at a time, so that a kill meets unfinished work."""
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"name": "p", "cache": {"kv@host": 1.0}, "max_batch": 4}))

    def command(source: Path, out: Path, *more: str) -> int:
        return runs.run(source, out, tiny, *more, policy=policy)

    return command


RAY = ("--engine", "ray", "--num-replicas", "2")


def requests(path: Path, count: int) -> Path:
    """Write prompts with answers of many lengths, half of them drawn at random, and two lines that are refused."""
    generator = np.random.default_rng(1)
    bodies = [
        {
            "prompt": generator.integers(3, 61, 1 + i % 7).tolist(),
            "max_tokens": 20 + i % 17,
            "temperature": i % 2,
            "ignore_eos": True,
        }
        for i in range(count)
    ]
    lines = runs.lines_of({f"r{i}": body for i, body in enumerate(bodies)})
    path.write_text("\n".join([*lines[: count // 2], "{}", *lines[count // 2 :], lines[0]]) + "\n")
    return path


def workers(name: str) -> set[int]:
    """Return the process ids of this cluster's workers whose title holds ``name``."""
    found, warm = set(), warm_python.ask({})
    for folder in Path("/proc").iterdir():
        try:
            title = (folder / "cmdline").read_bytes()
            if title.startswith(b"ray::") and name.encode() in title:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                raylet_of = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
                found |= {int(folder.name)} if parent == warm or raylet_of == os.getpid() else set()
        except (OSError, ValueError):  # no process, or gone
            continue
    return found


@pytest.fixture
def page(tmp_path, monkeypatch) -> list[str]:
    """Return the words of the page's command, in a folder like a clone of the project."""
    (tmp_path / "flexhybrid").symlink_to(ROOT / "flexhybrid")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLEXHYBRID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(opening, "measure_for_model", lambda *setting: MACHINE)
    monkeypatch.setattr(opening, "pick_dtype", lambda *setting: MACHINE.dtype)
    (command,) = COMMAND.findall((ROOT / "docs/on-a-cluster.md").read_text(encoding="utf-8"))
    return shlex.split(command)


def test_a_killed_actor_loses_and_doubles_no_line(page, two_cpus, tmp_path, monkeypatch, capsys):
    """The command is as written, with 8 requests at a time and with draws 3.6e-6 off a token's boundary, since batches
    round differently. Each message arrives alone: Ray gathers 128 MiB, so an hours-long job would show no progress."""
    from ray.data import Dataset

    count = len((ROOT / "flexhybrid/shipped/prompts.txt").read_text().splitlines())
    words, few = page, ["--max-num-seqs", "8", "--seed", "2", "--quiet"]
    assert words[-4:] == [*RAY] and words[words.index("-o") + 1] == "cluster.jsonl"
    local = [word.replace("cluster.jsonl", "local.jsonl") for word in words[:-4]]
    assert cli.main([*local, *few]) == 0
    killed, writes, messages = [], [], []

    def iter_batches(self, iter_batches=Dataset.iter_batches, **options):
        for table in iter_batches(self, **options):
            messages.append(table.num_rows)
            yield table

    def write(job, answered, write=run_module.JobLines.write):
        write(job, answered)
        writes.append(len(answered))
        if not killed:
            killed.extend(sorted(workers("MapWorker"))[:1])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Dataset, "iter_batches", iter_batches)
    monkeypatch.setattr(run_module.JobLines, "write", write)
    capsys.readouterr()
    assert cli.main([*words, *few]) == 0
    told = capsys.readouterr().out
    assert "2 actors with 1 CPU each" in told and f"{count} answered, 0 refused, 0 left of {count} lines" in told
    assert killed and writes[0] < count and sum(writes) == count
    assert set(messages) == {1} and len(messages) > count / 4, "no more messages than batches"
    assert runs.by_id(tmp_path / "cluster.jsonl") == runs.by_id(tmp_path / "local.jsonl")


def test_either_engine_continues_the_job_of_the_other(run, two_cpus, tmp_path, monkeypatch, capsys):
    source = requests(tmp_path / "in.jsonl", 24)
    assert run(source, tmp_path / "local.jsonl") == 0

    def interrupted(self, count, advance=run_module.Progress.advance):
        advance(self, count)
        if self.title == "tokens" and self.done:
            os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(run_module.Progress, "advance", interrupted)
        assert run(source, out) == 130
        before = len(runs.by_id(out))
        assert run(source, out, "--engine", "ray") == 130
    assert before < len(runs.by_id(out)) < 26
    told = capsys.readouterr().out
    assert "1 actor with 2 CPU each" in told and "give the same command again" in told
    assert run(source, out, "--seed", "1", *RAY) == 2 and "sampling.seed was 0, is 1" in capsys.readouterr().err
    assert run(source, out) == 0
    assert runs.by_id(out) == runs.by_id(tmp_path / "local.jsonl")


def config(tiny, model=None, layer_bytes=None):
    from flexhybrid.arguments import LLMArguments
    from flexhybrid.batch.requests import LineRules
    from flexhybrid.jobs.run.remote import ActorConfig

    policy = Policy(name="p", cache={"kv@host": 1.0}, max_batch=2)
    with LLM(tiny, policy, "cpu", dtype="float32") as llm:
        planned = llm.load()
    rules = LineRules("jsonl", {}, seed=0)
    arguments = LLMArguments(model or tiny, policy, "cpu", "float32")
    return ActorConfig(arguments, layer_bytes or planned, rules, created=0, heartbeat=4)


def test_actors_compute_as_the_machine_that_started_the_job(tiny, monkeypatch):
    """They ignore which dtype and kernels are fastest on their own machine."""
    from flexhybrid.jobs.run.remote import actor_config

    monkeypatch.setenv(ATTENTION, "products")
    with LLM(tiny, Policy(name="p", cache={"kv@host": 1.0}), "cpu", dtype="float32") as llm:
        sent = actor_config(llm, SimpleNamespace(rules=None), SimpleNamespace(run=None, layer_bytes=1), 0)
    monkeypatch.setenv(ATTENTION, "fused")
    with LLM.from_arguments(sent.llm) as actor:
        assert actor.problem.attention == llm.problem.attention and set(actor.problem.attention[:3]) == {"products"}


def test_an_actor_sends_the_same_messages_when_a_batch_is_retried(tiny, tmp_path):
    """Ray counts the pieces of retried work and does not send earlier ones again."""
    from flexhybrid.jobs.run.remote import LINES, Actor, pa

    lines = requests(tmp_path / "in.jsonl", 6).read_bytes().splitlines()[:3]
    batch = pa.table([[[1, 2, 3]], [lines]], LINES)
    actor = Actor(config(tiny))
    pieces = [table.to_pylist()[0] for table in actor(batch)]
    assert pieces == [table.to_pylist()[0] for table in Actor(config(tiny))(batch)]
    assert sorted(number for piece in pieces for number in piece["numbers"]) == [1, 2, 3]
    assert sum(piece["generated"] for piece in pieces) == sum(sum(piece["tokens"]) for piece in pieces) == 20 + 21 + 22
    assert len(pieces) > 40 // 4
    for wrong, words in (({"model": tiny / "none"}, "none"), ({"layer_bytes": {"device": 5}}, "that were planned")):
        (trouble,) = Actor(config(tiny, **wrong))(batch)
        assert words in trouble.to_pylist()[0]["error"]


def test_an_actor_plans_the_lengths_and_log_probabilities_that_the_job_counts(tiny):
    from flexhybrid.batch.request_index import index_requests
    from flexhybrid.jobs.run.remote import LineReader, RemoteBatch

    asked = [{"max_tokens": 5}, {"n": 3, "max_tokens": 9, "logprobs": 4}, {"max_tokens": 500, "prompt_logprobs": 2}]
    bodies = [{"prompt": list(range(3, 9 + i))} | one for i, one in enumerate(asked)]
    lines = [runs.line(str(i), **body).encode() for i, body in enumerate(bodies)]
    sent = config(tiny)
    with LLM.from_arguments(sent.llm) as llm:
        read = LineReader(sent.rules, llm.codec)
        request_index = index_requests(io.BytesIO(b"\n".join(lines)), read, llm.shape.max_context)
        for chosen in ([0, 1, 2], [0], [1], [2, 0]):
            row = {"numbers": [place + 1 for place in chosen], "lines": [lines[place] for place in chosen]}
            found = RemoteBatch(llm, read, sent, row, print).workload(np.array(chosen))
            counted = request_index.workload(np.array(chosen))
            assert found.prompt_tokens.tolist() == counted.prompt_tokens.tolist()
            assert found.max_tokens.tolist() == counted.max_tokens.tolist()
            assert found.noted[1] == counted.noted[1] and found.noted[0] <= counted.noted[0]
            assert bool(found.noted[0]) == bool(counted.noted[0])


@pytest.mark.parametrize(
    "nodes, device, asked, expected",
    [
        ([(16, 2), (16, 2)], "cuda", None, (4, 2, 8, 1)),
        ([(16, 2), (16, 2)], "cuda", 1, (1, 1, 16, 1)),
        ([(16, 2), (8, 0)], "cuda", None, (2, 2, 8, 1)),
        ([(16, 2), (8, 0)], "cpu", None, (2, 1, 8, 0)),
        ([(2, 0)], "cpu", 2, (2, 2, 1, 0)),
        ([(4, 0), (4, 0)], "cpu", 3, (3, 2, 2, 0)),
    ],
)
def test_there_is_one_executor_per_gpu_or_some_actors_per_node(nodes, device, asked, expected):
    resources = [{"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}} for cpus, gpus in nodes]
    ray = SimpleNamespace(nodes=lambda: [*resources, {"Alive": False, "Resources": {"CPU": 64, "GPU": 64}}])
    found = replicas_of(ray, device, asked)
    assert (found.size, found.actors_per_node, found.cpus, found.gpus) == expected


def test_missing_resources_of_the_cluster_are_named(run, tmp_path, monkeypatch, capsys):
    source = requests(tmp_path / "in.jsonl", 2)
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2}}])
    for device, actors, words in (("cuda", None, "no GPU"), ("cpu", 3, "has 2 CPUs"), ("cpu", 0, "--num-replicas 0")):
        with pytest.raises(InputError, match=words):
            replicas_of(ray, device, actors)
    assert run(source, tmp_path / "out", "--num-replicas", "2") == 2 and "needs --engine ray" in capsys.readouterr().err
    assert run(source, tmp_path / "out", *RAY, "--trace", "x") == 2 and "--trace" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(source, tmp_path / "out", *RAY) == 2 and "pip install 'ray[data,serve]" in capsys.readouterr().err


def test_a_local_cluster_is_started_only_where_no_address_is_given(tmp_path, monkeypatch):
    import ray
    from ray._private import services

    started, said, failures = [], [], [RuntimeError("timed out")]

    def init(address, **options):
        if failures:
            raise failures.pop()
        started.append(address)

    with socket.socket() as gone:
        gone.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{gone.getsockname()[1]}"
    monkeypatch.setattr(ray_cluster, "_own_clusters", lambda: own)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda folder: remembered)
    remembered, own = None, set()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: started.append("ended"))
    for address, words in (
        (nobody, f"no Ray cluster at RAY_ADDRESS={nobody}: nothing listens at"),
        ("nowhere", "no Ray cluster at RAY_ADDRESS=nowhere"),
        ("ray://x:1", "Ray Client"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(InputError, match=words), ray_cluster.cluster(said.append):
            pass
    assert "local" not in started and not said
    monkeypatch.delenv("RAY_ADDRESS")
    with ray_cluster.cluster(said.append):
        assert started[-1] == "local"
    assert started[-1] == "ended" and "none is known; a local one is started" in said[0]
    remembered = nobody  # of a cluster that has ended
    with ray_cluster.cluster(said.append):
        assert started[-1] == "local"
    assert "nothing listens at " in said[1] and nobody.rpartition(":")[2] in said[1]
    with socket.create_server(("", 0)) as somebody:  # Ray takes this machine's own address for 127.0.0.1
        remembered = f"127.0.0.1:{somebody.getsockname()[1]}"
        with ray_cluster.cluster(said.append):
            assert started[-1] == "local"
        assert "is this user's; a local one is started" in said[2]
        own = {remembered}
        with ray_cluster.cluster(said.append):
            assert started[-1].endswith(remembered.rpartition(":")[2])
        assert f"the cluster at {started[-2]} (your own `ray start`)" in said[3]
        own = set()
        monkeypatch.setenv("RAY_ADDRESS", remembered)  # whosever it is
        with ray_cluster.cluster(said.append):
            assert started[-1].endswith(remembered.rpartition(":")[2])
        assert said[4].endswith("(RAY_ADDRESS)") and len(said) == 5
        monkeypatch.delenv("RAY_ADDRESS")
    remembered = nobody
    failures.extend([RuntimeError("timed out"), RuntimeError("timed out")])
    with pytest.raises(InputError, match="did not start: timed out"), ray_cluster.cluster(said.append):
        pass


def test_clusters_of_this_user_are_distinguished_from_others(two_cpus, monkeypatch):
    import ray

    here = ray.get_runtime_context().gcs_address
    assert here in ray_cluster._own_clusters()
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert here not in ray_cluster._own_clusters()


# ---- a cascade -------------------------------------------------------------------------------------------------------


def post(port: int, body: dict, route: str = "") -> tuple[int, dict]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{route}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def status_of(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=120) as response:
        return json.load(response)


def test_a_cascade_on_ray_gives_the_local_answers_even_if_a_replica_dies(two_cpus, tmp_path, monkeypatch, capsys):
    """The whole command over HTTP with a plan and a killed replica, then its file; another cascade comes and goes
    meanwhile. Both models fail at a tenth of the requests, the large one at another tenth, which fall back."""
    from ray import serve

    x = np.arange(60, dtype=np.float32)[:, None] % 10 - 1
    np.savez(tmp_path / "data.npz", x=x, labels=x[:, 0].astype(int) + 1)
    models = CascadeModel("small", source="cascade_toys:Small"), CascadeModel("large", source="cascade_toys:Large")
    cascade = Cascade(models, (0.9,))
    cascade.save(tmp_path / "cascade.json")
    sizes = {"small": [["one"], ["two"]], "large": [["two"]]}
    planned = [{"name": name, "partitions": 1, "batch": 8, "gpus": gpus} for name, gpus in sizes.items()]
    gpus = [{"name": name, "host": "here"} for name in ("one", "two")]
    (tmp_path / "plan.json").write_text(json.dumps({"models": planned, "gpus": gpus}))
    run = ["cascade", "run", "--cascade", f"{tmp_path}/cascade.json"]
    command = [*run, "-i", f"{tmp_path}/data.npz", "--json", "-o"]
    port, killed, over_http = free_port(), [], []

    def ask(i: int) -> tuple[int, dict]:
        if i == 20:
            killed.extend(sorted(workers("ServeReplica:cascade:one"))[:1])
            os.kill(killed[0], signal.SIGKILL)
        return post(port, {"x": x[i].tolist()})

    def check_another() -> None:
        for name, route, words in (
            ("cascade", "/x", "already has an application 'cascade'"),
            ("other", "/", "is being used by appl"),
        ):
            options, nobody = ray_serve.ServeOptions(name=name, route=route), [functools.partial(pytest.fail)] * 2
            with pytest.raises(InputError, match=words), ray_serve.deployed(cascade, nobody, options, print):
                pass
        capsys.readouterr()
        assert (
            cli.main([*run, "--engine", "ray", "--device", "cpu", "--detach", "--name", "two", "--route", "/two"]) == 0
        )
        assert f"http://127.0.0.1:{port}/two, 2 models in 1 processes" in capsys.readouterr().err
        assert post(port, {"x": [8.0]}, "two")[0] == 200
        found = answer_all(serve.get_app_handle("two"), np.array([[8.0], [3.0]], dtype=np.float32), 5)
        assert [(answer.index, answer.model, answer.output) for answer in found] == [(5, "small", 9), (6, "large", 4)]
        status = status_of(f"http://127.0.0.1:{port}/two")
        assert [row["answered"] for row in status["models"]] == [2, 1] and status["under_way"] == 0
        assert cli.main(["cascade", "stop", "--name", "two"]) == 0
        assert cli.main(["cascade", "stop", "--name", "two"]) == 2
        assert "this cluster has no application 'two'; it has cascade" in capsys.readouterr().err
        assert list(serve.status().applications) == ["cascade"] and post(port, {"x": [3.0]})[1]["model"] == "large"
        assert status_of(f"http://127.0.0.1:{port}/")["num_requests"] == len(x) + 1

    def answer_file(handle, requests, first):
        with ThreadPoolExecutor(16) as load:
            over_http.extend(load.map(ask, range(len(requests))))
        assert post(port, {"y": 1})[0] == 400
        check_another()
        return answer_all(handle, requests, first)

    answer_all = ray_serve._answer_all
    monkeypatch.setattr(ray_serve, "_answer_all", answer_file)
    monkeypatch.setattr(ray_serve, "START_S", 500)  # how long it takes says something of the machine alone
    records, answers = [], []
    on_ray = ["--engine", "ray", "--port", str(port), "--plan", f"{tmp_path}/plan.json"]
    for name, more in (("here", []), ("ray", on_ray)):
        assert cli.main([*command, f"{tmp_path}/{name}.jsonl", *more]) == 0
        told = capsys.readouterr().out.splitlines()[-1]  # Ray outlives the command here, and may say something late
        records.append(json.loads(told) | dict.fromkeys(("path", "joules", "joules_per_request", "energy_source")))
        answers.append([json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()])
    here, in_bulk = answers
    assert killed and records[0] == records[1]
    assert (records[0]["fallbacks"], records[0]["unanswered"], len(here)) == (6, 6, 60)
    assert {answer["model"] for answer in here} == {"small", "large", None}
    assert [status for status, _ in over_http] == [503 if answer["model"] is None else 200 for answer in here]
    for there in (in_bulk, [{**body, "index": i} for i, (_, body) in enumerate(over_http)]):
        for expected, found in zip(here, there, strict=True):  # a batch of another size may round otherwise
            assert expected | {"confidence": None} == found | {"confidence": None}
            assert (expected["confidence"] or 0) == pytest.approx(found["confidence"] or 0, rel=1e-5)
    assert not serve.status().applications and not serve.status().proxies
