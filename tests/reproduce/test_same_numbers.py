"""What a command line can say of a judged row is the number that ``reproduce`` prints for it.

Rows of CAPTURE's Fig. 12 and of published H2O, DeepSpeed and Accelerate runs are such calls. No command line says
FlexGen's published placements with pageable weights or a cache on the disk: their rates differ from verb to verb.
"""

import pytest

from experiments.reproduce.capture import setup as capture
from experiments.reproduce.infinigen import setup as infinigen
from experiments.reproduce.infinigen.performance import MATRICES
from experiments.reproduce.kvpr import setup as kvpr
from experiments.reproduce.kvpr.latency import TABLES, accelerate_s, kvpr_s
from experiments.reproduce.kvpr.throughput import TABLE2_BATCHES, table2_rates, table5_rates
from flexhybrid.core.errors import InputError
from flexhybrid.core.hardware import Line
from flexhybrid.core.model.shape import shape_by_name
from flexhybrid.core.problem import Problem
from policy_search.systems import Setting, run_system, system
from sim import catalogue
from sim.implementation import MEASURED, known_code, on

DECODE = "decode_tokens_per_s"


def rate(text: str, machine: str, model: str, lengths: tuple[int, int, int], metric: str = "tokens_per_s") -> float:
    """Return ``flexhybrid simulate``'s number; ``lengths``: requests, prompt and generated tokens."""
    problem = Problem(shape=shape_by_name(model.lower()), dtype="float16", hardware=catalogue.load(machine))
    return getattr(run_system(text, Setting(problem, *lengths)), metric)


@pytest.mark.parametrize("model", ["OPT-6.7B", "OPT-66B"])
def test_captures_rows(model):
    systems = {"act_only": "act_only", "hybrid_static": "hybrid_static", "hybrid_full": "capture(device_act=true)"}
    for variant, text in systems.items():
        ours = capture.run_variant(variant, model, capture.hardware()).tokens_per_s[0]
        assert rate(text, capture.ENTRY, model, (128, 1920, 128)) == pytest.approx(ours)


def test_kvprs_rows():
    rates = table5_rates(kvpr.rtx5000())
    for place, (prompt, generated) in enumerate(kvpr.LONG):
        size = int(kvpr.mini_batch_tokens(prompt, generated))
        systems = {
            "FlexGen": f"offloaded(max_mini_batch_tokens={size}, overlap=step, weights_device=0)",
            "KVPR, paper rule": f"kvpr_column(max_mini_batch_tokens={size}, overlap=step)",
        }
        for name, text in systems.items():
            found = rate(text, "rtx5000-kvpr", "OPT-6.7B", (256, prompt, generated), DECODE)
            assert found == pytest.approx(rates[name][place], rel=1e-5)  # the entry's numbers have six digits


def test_kvprs_rows_of_one_batch():
    """The rows are those of Table 2, and the latencies of Tables 3 and 4. The host delays each layer by the fitted
    time. KVPR's program computes all of the reserved length in each step: its row is G - 1 times the TPOT of eight
    tokens around P + G."""
    waits = kvpr.fit_host_s().value
    code, rates = f"engine=flexgen, weights_wait_s={waits}", table2_rates(kvpr.a100("one"))
    systems = {
        "FlexGen": f"offloaded(overlap=step, weights_device=0, {code})",
        "KVPR without hiding": f"kvpr_column(hiding=false, max_mini_batch_tokens=1000000, overlap=step, {code})",
    }
    for name, text in systems.items():
        for batch, ours in zip(TABLE2_BATCHES, rates[name], strict=True):
            assert rate(text, "a100-kvpr", "OPT-6.7B", (batch, 256, 64), DECODE) == pytest.approx(ours, rel=1e-5)
    text, kvpr_row = (
        f"{name}overlap=step, cache_wait_s={waits})" for name in ("accelerate(engine=ours, ", "kvpr_row(")
    )
    for model in TABLES.values():
        for (prompt, generated), ours in zip(kvpr.SHORT, kvpr_s(model, kvpr.SHORT), strict=True):
            lengths = kvpr.LATENCY_BATCH, prompt + generated - 4, 8
            step_s = rate(kvpr_row, "a100-kvpr", model, lengths, "tpot_s")
            assert (generated - 1) * step_s == pytest.approx(ours, rel=1e-5)
        for (prompt, generated), ours in zip(kvpr.SHORT, accelerate_s(model, kvpr.SHORT), strict=True):
            lengths = kvpr.LATENCY_BATCH, prompt, generated
            assert rate(text, "a100-kvpr", model, lengths, "decode_s") == pytest.approx(ours, rel=1e-5)


def test_infinigens_rows():
    """The rows are Fig. 15 at batch 20, and Fig. 16 at one length and for a model whose weights do not all fit."""
    options = {"FlexGen": "offloaded(", "INT4": "int4(", "H2O": "h2o(whole_layers=2, overlap=none, "}
    options["InfiniGen"] = "infinigen(whole_layers=2, overlap=none, "

    def rates(model: str, lengths: tuple[int, int, int], share: float) -> dict[str, float]:
        weights = f"weights_device={share})"
        return {name: rate(text + weights, "a6000-infinigen", model, lengths) for name, text in options.items()}

    for name, found in rates("opt-13b", (20, 1920, 128), 1.0).items():
        assert found == pytest.approx(float(infinigen.throughput(name, 20)), rel=1e-5)
    for model, share, lengths in (("opt-13b", 1.0, (8, 384, 128)), ("opt-30b", MATRICES, (4, 1920, 128))):
        found = rates(model, lengths, share)
        gains = infinigen.speedups(*lengths[:2], shape_by_name(model), weights_device=share)
        for name, gain in gains.items():
            assert found[name] / found["FlexGen"] == pytest.approx(float(gain[0]))


def test_flexgens_code_is_taken_by_name_once():
    """Its constants are those that ``reproduce`` fits. A machine whose rates were fitted to FlexGen has them
    already."""
    code = MEASURED["flexgen"]
    assert code.relay_gb_per_s == pytest.approx(capture.refit_relay().value, rel=0.01)
    t4 = catalogue.load("t4")
    fit, engine = t4.notes["published_fit"], catalogue.load("t4-flexgen")
    assert code.gemm_of_peak == pytest.approx(fit["prefill_gemm_tflops"] * 1e12 / t4.notes["peak_flops"], rel=0.02)
    assert code.attention == pytest.approx(
        1e12 * fit["decode_attention_tflops"] / t4.notes["memory_bytes_per_s"], rel=0.01
    )
    assert code.conversion == pytest.approx(
        engine.lines["compute"].s_per_byte / engine.lines["dequantize_kv"].s_per_byte, rel=0.01
    )
    for name in ("t4-flexgen", "a6000-infinigen", "rtx5000-kvpr"):
        machine = catalogue.load(name)
        assert on(known_code("flexgen", machine), machine).lines == machine.lines
        given = system(
            "flexgen(cache_link=0.5)", Setting(Problem(shape=shape_by_name("opt-6.7b"), hardware=machine), 8, 64, 8)
        )
        before, after = (of.line("load_kv", "h2d").s_per_byte for of in (machine, given.hardware))
        assert after == pytest.approx(2 * before)  # what is given holds there too
    plain = catalogue.load("rtx4090")
    seen = on(code, plain)
    assert seen.lines["load_kv"].s_per_byte == pytest.approx(plain.lines["h2d"].s_per_byte + 1e-9 / 33.7)
    assert seen.line("load_weights", "h2d") == plain.line("load_weights", "h2d")
    assert 1 / seen.line("project", "compute").s_per_flop == pytest.approx(0.33 * plain.notes["peak_flops"])
    assert seen.lines["assemble"] == Line()


def test_flexgen_undoes_bits_for_every_gpu_batch_and_ours_does_not():
    problem = Problem(shape=shape_by_name("opt-6.7b"), hardware=catalogue.load("t4-flexgen"))
    setting = Setting(problem, 256, 512, 32)
    theirs, once = system("flexgen(compress=true)", setting), setting.machine.lines["dequantize_weights"].s_per_byte
    ours, plain = "flexgen(compress=true, engine=ours)", catalogue.load("t4")
    assert system(ours, setting.on(plain)).hardware == plain
    with pytest.raises(InputError, match="t4-flexgen has the rates of flexgen's code; for ours name another"):
        system(ours, setting)
    size = theirs.policy.max_mini_batch_tokens // (512 + 32 + 1)  # padded to whole blocks: 545 tokens a request
    count = -(-256 // size)
    assert count > 1 and theirs.hardware.lines["dequantize_weights"].s_per_byte == pytest.approx(count * once)
