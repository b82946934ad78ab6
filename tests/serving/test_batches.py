"""Test /v1/files and /v1/batches: the answers are those of `flexhybrid run`, after any kill as well."""

import io
import json
from functools import partial

import openai
import pytest
from runs import by_id, run
from served import CHAT, COMPLETION, alike, bodies, line, serving

from flexhybrid.batch.openai import URLS


@pytest.fixture(scope="module")
def source(folder):
    """A file of completions of all kinds, some of them refused or blank, without seeds in some."""
    kinds = [body for url, body in bodies(110, seed=3, longest=40) if url == COMPLETION][:60]
    lines = [line(f"r{place}", **body) for place, body in enumerate(kinds)]
    lines += [
        "",
        "{",
        line("r1", prompt="again"),
        line("long", prompt="x " * 9000),
        line("drawn", prompt="def", top_k=4),
    ]
    path = folder / "in.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def wanted(folder, checkpoint, source):
    run(source, folder / "out.jsonl", checkpoint, "--errors", folder / "errors.jsonl")
    return [by_id(folder / name) for name in ("out.jsonl", "errors.jsonl")]


def results(client, batch, folder) -> list[dict]:
    """Return the answers and errors of a complete batch."""
    found = []
    for name in (batch.output_file_id, batch.error_file_id):
        (folder / "got.jsonl").write_bytes(client.files.content(name).read())
        found.append(by_id(folder / "got.jsonl"))
    return found


def start(client, source, endpoint=COMPLETION):
    with open(source, "rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    assert client.files.content(uploaded.id).read() == source.read_bytes()
    return client.batches.create(
        input_file_id=uploaded.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )


def wait(served, client, batch):
    served.wait_until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled"), 240)
    return client.batches.retrieve(batch.id)


def done(client, name, count) -> bool:
    """Return whether ``count`` lines of a batch are done."""
    counts = client.batches.retrieve(name).request_counts
    return counts.completed + counts.failed >= count


def test_a_batch_has_the_answers_of_a_run(folder, checkpoint, source, wanted):
    with serving(checkpoint, "--files-dir", folder / "files") as served, served.client() as client:
        batch = wait(served, client, start(client, source))
        assert batch.status == "completed" and batch.metadata == {"a": "b"}
        assert alike(results(client, batch, folder), wanted)
        counts = batch.request_counts
        assert (counts.completed, counts.failed, counts.total) == (len(wanted[0]) + 1, len(wanted[1]), 61)
        assert batch.id in [one.id for one in client.batches.list()]
        assert {batch.input_file_id, batch.output_file_id} <= {one.id for one in client.files.list()}
        client.files.delete(batch.input_file_id)
        with pytest.raises(openai.NotFoundError):
            client.files.content(batch.input_file_id)
        for name in ("file-" + "0" * 24, "../lock", "batch-1"):
            assert served.http.get(f"/v1/files/{name}/content").status_code == 404
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id="file-1", endpoint="/v1/completions", completion_window="24h")


def test_a_batch_continues_after_kills_without_loss(folder, checkpoint, source, wanted):
    files, batch = folder / "killed", None
    for after in (5, 20, 40):
        with serving(checkpoint, "--files-dir", files) as served, served.client() as client:
            batch = batch or start(client, source)
            served.wait_until(partial(done, client, batch.id, after))
            served.process.kill()
    with serving(checkpoint, "--files-dir", files) as served, served.client() as client:
        batch = wait(served, client, batch)
        assert batch.status == "completed" and alike(results(client, batch, folder), wanted)


def test_a_cancelled_batch_keeps_its_answers_and_another_model_is_refused(folder, checkpoint, source, wanted):
    files = folder / "cancelled"
    with serving(checkpoint, "--files-dir", files, "--max-num-seqs", 1) as served, served.client() as client:
        first, second = start(client, source), start(client, source)
        served.wait_until(lambda: client.batches.retrieve(first.id).request_counts.completed > 0)
        client.batches.cancel(first.id)
        batch = wait(served, client, first)
        assert batch.status == "cancelled"
        (folder / "got.jsonl").write_bytes(client.files.content(batch.output_file_id).read())
        assert all(alike(answer, wanted[0][name]) for name, answer in by_id(folder / "got.jsonl").items())
        with pytest.raises(AssertionError, match="another server uses"), serving(checkpoint, "--files-dir", files):
            pass
    with serving(checkpoint, "--files-dir", files, "--top-k", 3) as served, served.client() as client:
        batch = wait(served, client, second)
        assert batch.status == "failed" and "other settings" in batch.errors.data[0].message


def test_a_batch_answers_the_lines_of_its_endpoint(folder, checkpoint):
    asked = bodies(20, seed=4)
    lines = [line(f"r{place}", url, **body) for place, (url, body) in enumerate(asked)]
    source = folder / "mixed.jsonl"
    source.write_text("\n".join(lines) + "\n")
    run(source, folder / "mixed-out.jsonl", checkpoint)
    wanted = by_id(folder / "mixed-out.jsonl")
    ids = {url: {f"batch_req_{number:08}" for number, one in enumerate(asked, 1) if one[0] == url} for url in URLS}
    with serving(checkpoint, "--files-dir", folder / "mixed") as served, served.client() as client:
        for endpoint, other in ((CHAT, COMPLETION), (COMPLETION, CHAT)):
            batch = wait(served, client, start(client, source, endpoint))
            answers, errors = results(client, batch, folder)
            assert alike(answers, {name: wanted[name] for name in ids[endpoint]})
            assert errors.keys() == ids[other] and all(endpoint in str(error) for error in errors.values())
        with pytest.raises(openai.ConflictError, match="completed"):
            client.batches.cancel(batch.id)
        (folder / "wrong.jsonl").write_text("{\n" + line("a", CHAT, messages=[{"role": "user", "content": "x"}]) + "\n")
        batch = wait(served, client, start(client, folder / "wrong.jsonl"))
        assert batch.status == "failed" and "error file" in batch.errors.data[0].message and batch.error_file_id
        purposes = {one.purpose for one in client.files.list(purpose="batch")}
        assert purposes == {"batch"} and len(list(client.files.list())) > len(list(client.files.list(purpose="batch")))


def test_http_requests_pass_the_lines_of_a_batch(folder, checkpoint):
    lines = [line(str(i), prompt="x", max_tokens=60, ignore_eos=True) for i in range(40)]
    (folder / "many.jsonl").write_text("\n".join(lines) + "\n")
    options = ("--files-dir", folder / "behind", "--max-num-seqs", 2)
    with serving(checkpoint, *options) as served, served.client() as client:
        batch = start(client, folder / "many.jsonl")
        served.wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
        client.completions.create(model="qwen", prompt="y", max_tokens=2)
        assert client.batches.retrieve(batch.id).request_counts.completed < 40
        assert wait(served, client, batch).request_counts.completed == 40


def test_an_upload_needs_its_fields(folder, checkpoint):
    with serving(checkpoint, "--files-dir", folder / "uploads") as served:
        assert served.http.post("/v1/files", files={"file": ("a", io.BytesIO(b"x"))}).status_code == 400
        assert served.http.post("/v1/files", content=b"x" * 9).status_code == 400
        assert served.http.post("/v1/batches", content=json.dumps({"input_file_id": 3})).status_code == 404
        assert served.http.post("/v1/batches", content=b"{").status_code == 400
        fields = {"file": ("a", io.BytesIO(b"x"))}
        refused = served.http.post("/v1/files", files=fields, data={"purpose": "fine-tune"})
        assert refused.status_code == 400 and "must be batch" in refused.text
    with serving(checkpoint, "--served-model-name", "foo") as served:
        for path in ("files", "files/file-1/content", "batches"):
            refused = served.http.get(f"/v1/{path}")
            assert refused.status_code == 404 and "--files-dir" in refused.json()["error"]["message"]
        answer = served.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert answer.json()["model"] == "foo"
