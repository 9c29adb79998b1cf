"""Each fault that execution promises to report is planted, beside a clean twin."""

import re

import numpy as np
import pytest

from tests.metal.example import Example, arange
from tests.metal.execute import ExecutionError, execute

LOCALS = """
const uint t = thread_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup;
const uint at = thread_position_in_grid.x;
threadgroup float shared[64];
"""

# Name: (kinds of the report, body), where «a|b» is a in the faulty kernel and b in its clean twin.
FAULTS = {
    "SIMD sum of half the lanes": (
        "divergence",
        "float s = 0.0f; if («lane < 16|t < 32») s = simd_sum(x[at]); out[at] = s;",
    ),
    "SIMD sums at two calls": (
        "divergence",
        """float s;
        if («lane|t» < 32) s = simd_sum(x[at]);
        «if (lane < 7) s = simd_sum(x[at]); else|» s = simd_sum(2.0f * x[at]);
        out[at] = s;""",
    ),
    "SIMD sum after a lane ended": (
        "divergence",
        "if («lane == 3|t >= 32») return; out[at] = simd_sum(x[at]);",
    ),
    "matrix product of half the lanes": (
        "divergence",
        """simdgroup_matrix<float, 8, 8> a, c;
        simdgroup_load(a, x, 8);
        if («lane < 16|t < 32») simdgroup_multiply(c, a, a);
        out[at] = c.thread_elements()[0];""",
    ),
    "barrier that a SIMD-group never reaches": (
        "divergence",
        """if (t < «32|64») threadgroup_barrier(mem_flags::mem_threadgroup);
        out[at] = x[at];""",
    ),
    "barriers at two calls": (
        "divergence",
        """if (t < «32|64») threadgroup_barrier(mem_flags::mem_none);
        else threadgroup_barrier(mem_flags::mem_none);
        out[at] = x[at];""",
    ),
    "barrier in a loop of unequal lengths": (
        "divergence",
        """for (uint i = 0; i < «t / 32 + 1|2»; ++i) threadgroup_barrier(mem_flags::mem_none);
        out[at] = x[at];""",
    ),
    "read past an input": ("out_of_bounds", "out[at] = x[at + «1|0»];"),
    "read before an input": ("out_of_bounds", "out[at] = x[int(at) - «1|0»];"),
    "read far past an input": ("out_of_bounds", "out[at] = x[long(at) * «100000000|1»];"),
    "vector read past the end": (
        "out_of_bounds",
        "float4 v = reinterpret_cast<const device float4*>(x)[t % 16 + «1|0»]; out[at] = v.w;",
    ),
    "write past an output": ("out_of_bounds", "out[at + «1|0»] = x[at];"),
    "write past a threadgroup array": (
        "out_of_bounds",
        "shared[t + «1|0»] = x[at]; out[at] = shared[t + «1|0»];",
    ),
    "write past threadgroup memory by a pointer": (
        "out_of_bounds",
        """threadgroup float* p = shared + «1|0»;
        p[t] = x[at];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[at] = p[63 - t];""",
    ),
    "index past a thread's own array": (
        "out_of_bounds",
        "float mine[4] = {}; mine[lane % «5|4»] = x[at]; out[at] = mine[at % 4];",
    ),
    "shuffle from a lane that does not exist": (
        "out_of_bounds",
        "out[at] = simd_shuffle(x[at], ushort(«32|31»));",
    ),
    # A thread that reads first finds nothing written; one that reads later finds the race.
    "no barrier between write and read": (
        "race uninitialised",
        """shared[t] = x[at];
        «|threadgroup_barrier(mem_flags::mem_threadgroup);»
        out[at] = shared[63 - t];""",
    ),
    "no barrier between read and write": (
        "race",
        """shared[t] = x[at];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float other = shared[63 - t];
        «|threadgroup_barrier(mem_flags::mem_threadgroup);»
        shared[t] = other;
        out[at] = shared[t];""",
    ),
    "a barrier of the SIMD-group only": (
        "race uninitialised",
        """shared[t] = x[at];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        out[at] = shared[t ^ «32|1»];""",
    ),
    "a barrier that orders no memory": (
        "race",
        """shared[t] = x[at];
        threadgroup_barrier(mem_flags::«mem_none|mem_threadgroup»);
        out[at] = shared[63 - t];""",
    ),
    "a barrier that orders other memory": (
        "race",
        """shared[t] = x[at];
        threadgroup_barrier(mem_flags::«mem_device|mem_threadgroup»);
        out[at] = shared[63 - t];""",
    ),
    "a SIMD sum taken for a barrier": (
        "race",
        """shared[t] = x[at];
        float s = simd_sum(x[at]);
        out[at] = s + shared[t ^ «1|0»];""",
    ),
    "two threads write one element": (
        "race",
        """shared[t / «2|1»] = x[at];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[at] = shared[0];""",
    ),
    "two threads write one element of an output": ("race", "out[at / «2|1»] = x[at];"),
    "matrix stored and read without a barrier": (
        "race uninitialised",
        """if (t >= 32) return;
        simdgroup_matrix<float, 8, 8> a;
        simdgroup_load(a, x, 8);
        simdgroup_store(a, shared, 8);
        «|simdgroup_barrier(mem_flags::mem_threadgroup);»
        out[at] = shared[63 - t];""",
    ),
    "read of threadgroup memory that nobody wrote": (
        "uninitialised",
        "if (t != «5|64») shared[t] = x[at]; out[at] = shared[t];",
    ),
    "read of an output that nobody wrote": (
        "uninitialised",
        "«|out[at] = 0.0f;» out[at] += x[at];",
    ),
    "write through a read-only input": (
        "read_only",
        "«const_cast<device float*>(x)|out»[at] = 0.0f;",
    ),
    "vector load at an odd place": (
        "misaligned",
        """float4 v = reinterpret_cast<const device float4*>(x + «2|4»)[t % 8];
        out[at] = v.x;""",
    ),
    "overflow of 32 bits": (
        "overflow",
        "out[at] = float(«int|long»(at + 3000) * 1000000);",
    ),
}
_CHOICE = re.compile(r"«(.*?)\|(.*?)»", re.DOTALL)


@pytest.mark.parametrize("name", FAULTS)
def test_reports(name):
    kinds, body = FAULTS[name]
    Example(LOCALS + _CHOICE.sub(r"\2", body)).run()
    faulty = Example(LOCALS + _CHOICE.sub(r"\1", body))
    for seed in range(3):
        with pytest.raises(ExecutionError) as caught:
            faulty.run(seed)
        assert caught.value.kind in kinds.split()


def test_report_says_who_what_and_where():
    body = "const uint at = thread_position_in_grid.x;\nif (at == 40) out[at] = x[at + 30];"
    with pytest.raises(ExecutionError) as caught:
        Example(body, group=32).run()
    message = str(caught.value)
    assert "thread 8 of threadgroup (1, 0, 0)" in message
    assert "reads element 70 of x, which has 64" in message


def test_divergence_says_which_lanes_wait_where():
    with pytest.raises(ExecutionError) as caught:
        Example(LOCALS + "float s = 0.0f;\nif (lane < 16) s = simd_sum(x[at]);\nout[at] = s;").run()
    assert "wait in simd_sum" in str(caught.value)
    assert "ended" in str(caught.value)


def test_element_written_by_two_threadgroups_is_a_race():
    with pytest.raises(ExecutionError) as caught:
        Example("out[thread_index_in_threadgroup] = x[0];", group=32).run()
    assert caught.value.kind == "race"


def test_inputs_written_in_place_come_back():
    body = """
        const uint at = thread_position_in_grid.x;
        const_cast<device float*>(x)[63 - at] = float(at);
        out[at] = 0.0f;"""
    ran = Example(body, in_place=("x",)).run()
    np.testing.assert_array_equal(ran["x"], arange(64)[::-1])


def test_what_no_thread_writes_is_nan():
    out = Example(
        "if (thread_position_in_grid.x != 5) out[thread_position_in_grid.x] = 1.0f;"
    ).out_of()
    np.testing.assert_array_equal(np.isnan(out), arange(64) == 5)


def test_threadgroup_memory_of_the_last_threadgroup_is_not_there():
    body = (
        LOCALS
        + """
        if (at < 32) shared[t] = 1.0f;
        out[at] = shared[t];"""
    )
    with pytest.raises(ExecutionError) as caught:
        Example(body, group=32).run()
    assert caught.value.kind == "uninitialised"


def test_last_threadgroup_is_cut_to_the_grid():
    body = """
        const uint at = thread_position_in_grid.x;
        out[at] = float(threads_per_threadgroup.x + 100 * simdgroups_per_threadgroup);"""
    out = Example(body, threads=64, group=40).out_of()
    np.testing.assert_array_equal(out, [*[240] * 40, *[124] * 24])


def test_array_of_another_type_is_refused():
    example = Example("out[0] = x[0];")
    source = example.source()
    with pytest.raises(ExecutionError, match="float64 for float"):
        execute(source, {"x": arange(64, np.float64)}, {"out": example.out}, (1, 1, 1), (1, 1, 1))


def test_an_array_that_is_missing_is_named():
    example = Example("out[0] = x[0];")
    with pytest.raises(ExecutionError, match="no array for x"):
        execute(example.source(), {}, {"out": example.out}, (1, 1, 1), (1, 1, 1))


def test_order_of_threads_follows_the_seed():
    # Only a race sees the order: the report names the thread that was second.
    body = (
        LOCALS
        + """
        shared[0] = x[at];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        out[at] = shared[0];"""
    )
    reports = set()
    for seed in (0, 0, 1, 2, 3):
        with pytest.raises(ExecutionError) as caught:
            Example(body).run(seed)
        reports.add(str(caught.value))
    assert 2 <= len(reports) <= 4
