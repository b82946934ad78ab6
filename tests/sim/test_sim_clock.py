"""Test the virtual clock against runs worked out by hand, the trace checker, and summaries of traces."""

from __future__ import annotations

import numpy as np
import pytest

from flexhybrid.core.hardware import CALL_S, LINKS, Hardware, Line
from flexhybrid.core.model.shape import ModelShape
from flexhybrid.core.plan import stream
from flexhybrid.core.policy import Placement, Policy
from flexhybrid.core.problem import Problem
from flexhybrid.core.task import Access, Task, Work
from flexhybrid.core.trace import TraceEvent, check_trace
from flexhybrid.core.wave import admit
from flexhybrid.core.workload import Workload
from sim import presets
from sim.cost import price
from sim.virtual_clock import run, summarize

SHAPE = ModelShape("tiny", "opt", 3, 64, 4, 4, 16, 256, 128, 512)


def machine(compute_s: float = 0.0, link_s_per_byte: float = 0.0, link_s: float = 0.0) -> Hardware:
    """Return a machine on which every compute task takes the same time; d2h and host compute cost nothing."""
    return Hardware(
        "toy",
        "cpu",
        {"compute": Line(compute_s), "h2d": Line(link_s, 0.0, link_s_per_byte), "d2h": Line(), "host_compute": Line()},
    )


def task(number: int, verb: str, resource: str, reads=(), writes=(), link_bytes: int = 0, tokens: int = 0) -> Task:
    return Task(number, 0, 0, verb, resource, Work(link_bytes=link_bytes, tokens=tokens), tuple(reads), tuple(writes))


def virtual(policy, hardware, batch=4, prompt=20, generated=3):
    wave = admit(Problem(shape=SHAPE, dtype="float16"), policy, Workload.uniform(batch, prompt, generated))
    return run(stream(wave), hardware)


def test_two_tasks_wait_for_what_they_read_and_for_their_resource():
    cell = Access(("cell",), 0, 1)
    tasks = [task(0, "load_kv", "h2d", writes=[cell]), task(0, "attend", "compute", reads=[cell]),
             task(0, "load_kv", "h2d", writes=[cell]), task(0, "finish", "compute")]  # fmt: skip
    trace = run(tasks, machine(compute_s=2.0, link_s=3.0))
    # load 0..3, attend after it 3..5, the second load after the reader 5..8, finish when compute is free 5..7
    assert [(e.start_s, e.end_s) for e in trace] == [(0, 3), (3, 5), (5, 8), (5, 7)]


def test_host_attention_arrives_before_the_mini_batch_before_is_finished():
    """Weights are queued after it on the link, and would be late if it waited."""
    policy = Policy(weights=Placement(host=1.0), attention="host", max_mini_batch_tokens=40)
    trace = virtual(policy, machine(compute_s=1.0, link_s=0.01))
    ends = {e.task.key: e.end_s for e in trace}
    early = [
        e.start_s < ends[e.task._replace(verb="finish", mini_batch=e.task.mini_batch - 1).key]
        for e in trace
        if e.task.verb == "load_attended" and e.task.mini_batch
    ]
    assert early and all(early) and not check_trace(trace, 1e-12)


@pytest.mark.parametrize(
    ("load_s", "total_s"),
    [
        # 0..1 embed beside the first load; three layers of project, attend, finish; head, sample
        (1.0, 1 + 3 * 3 + 2),
        # loads 0..5, 5..10, 10..15 (its slot is free at 8); the last layer 15..18; head, sample
        (5.0, 3 * 5 + 3 + 2),
    ],
)
def test_a_run_worked_out_by_hand(load_s, total_s):
    """Three layers, one mini-batch, streamed weights, one token; every compute task takes 1 s."""
    summary = summarize(virtual(presets.kv_only(), machine(compute_s=1.0, link_s=load_s), generated=1))
    assert summary.total_s == pytest.approx(total_s)
    assert summary.binding == {1.0: "compute", 5.0: "h2d"}[load_s]
    assert summary.decode_s == 0 and summary.decode_tokens_per_s == 0 and summary.generated_tokens == 4


def test_summary_splits_prefill_and_decode_and_counts_bytes_by_cause():
    trace = virtual(presets.hybrid(0.5), machine(compute_s=1e-3, link_s_per_byte=1e-8), generated=3)
    summary = summarize(trace)
    assert summary.num_iterations == 3
    assert summary.generated_tokens == 12
    assert summary.prefill_s + summary.decode_s == pytest.approx(summary.total_s)
    assert summary.tokens_per_s == pytest.approx(12 / summary.total_s)
    assert summary.decode_tokens_per_s == pytest.approx(8 / summary.decode_s)
    p = 2
    # 20 prompt tokens are 2 blocks, one ACT (first in a tie), one KV; contexts 20 and 21 in the decode
    assert summary.link_bytes["h2d"]["load_act"] == 2 * 3 * 4 * 16 * 64 * p
    assert summary.link_bytes["h2d"]["load_kv"] == 2 * 3 * 4 * 16 * 128 * p
    assert summary.link_bytes["d2h"]["store_act"] == 3 * 4 * 16 * 64 * p
    assert summary.decode_link_bytes["d2h"]["store_out"] == 2 * 4 * 8
    assert "store_act" not in summary.decode_link_bytes["d2h"]


def test_summary_counts_what_the_disk_reads_and_writes():
    policy = Policy(cache={"kv@disk": 1.0}, weights=Placement(host=0.5, disk=0.5))
    line = Line(0.0, 0.0, 1e-9)
    hardware = Hardware("toy", "cpu", dict.fromkeys(("compute", "host_compute", *LINKS), line))
    trace = virtual(policy, hardware, generated=3)
    summary = summarize(trace)
    token = 2 * 64 * 2  # key and value of 64 two-byte numbers
    assert summary.link_bytes["disk_write"] == {"write_kv": 3 * 4 * (20 + 2) * token}
    assert summary.link_bytes["disk_read"]["read_kv"] == summary.link_bytes["h2d"]["load_kv"] == 2 * 3 * 4 * 32 * token
    read = sum(event.task.work.link_bytes for event in trace if event.task.verb == "read_weights")
    assert summary.link_bytes["disk_read"]["read_weights"] == read > 0
    assert summary.decode_link_bytes["disk_write"] == {"write_kv": 3 * 4 * 2 * token}


def test_a_measured_trace_is_summarized_alike():
    """Times are shifted like a real clock's, and samples are out of stream order."""
    trace = virtual(presets.hybrid(0.5), machine(compute_s=1e-3, link_s_per_byte=1e-8))
    shifted = [TraceEvent(t, start + 7.0, end + 7.0) for t, start, end in trace]
    assert summarize(shifted).total_s == pytest.approx(summarize(trace).total_s)
    assert summarize(shifted).busy == pytest.approx(summarize(trace).busy)
    with pytest.raises(ValueError):
        summarize([])


def test_links_are_priced_by_link_bytes_and_the_rest_by_memory_bytes():
    hardware = Hardware("x", "cpu", {"compute": Line(0, 2.0, 3.0), "h2d": Line(0, 0, 5.0)})
    work = Work(link_bytes=7, memory_bytes=11, flops=13)
    assert price(hardware, "finish", "compute", work) == 2 * 13 + 3 * 11
    assert price(hardware, "load_kv", "h2d", work) == 5 * 7
    assert price(hardware, "rank", "compute", work._replace(calls=1000)) == pytest.approx(
        2 * 13 + 3 * 11 + 1000 * CALL_S
    )
    many = Work(link_bytes=np.array([1, 2]))
    assert price(hardware, "load_kv", "h2d", many).tolist() == [5, 10]
