"""Collectives and copies read from the text of a compiled program, as TPUs' and CPUs' compilers write it."""

from tpu_serve.bench.compiled.collectives import collectives, copies

TEXT = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

%all-reduce-scatter.1 (p: f32[64,128]) -> f32[8,128] {
  %all-reduce.9 = f32[64,128]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %slice = f32[8,128]{1,0} dynamic-slice(%all-reduce.9, %c)
}

%fused_computation (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %copy.1 = bf16[1024,1024]{0,1} copy(%p)
  ROOT %transpose.1 = bf16[1024,1024]{1,0} transpose(%copy.1)
}

%called_computation (p: bf16[64,512], t: token[]) -> bf16[64,512] {
  ROOT %all-reduce.27 = bf16[64,512]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
}, execution_thread="sparsecore"

%body (p: s32[4]) -> s32[4] {
  ROOT %all-gather.1 = s32[4]{0} all-gather(%p), replica_groups={{0,1},{2,3}}, metadata={op_name="jit(step)/sampler/while/body/reduce"}
}

%taken (p: s32[4]) -> s32[4] {
  %loop = s32[4]{0} while(%p), condition=%cond, body=%body
  ROOT %collective-permute.1 = s32[4]{0} collective-permute(%loop), source_target_pairs={{0,1},{1,2},{2,0}}
}

%skipped (p: s32[4]) -> s32[4] {
  ROOT %copy.2 = s32[4]{0} copy(%p)
}

ENTRY %main (a: bf16[64,2048], b: f32[64,128]) -> s32[4] {
  %all-reduce.7 = (bf16[64,2048]{1,0:T(8,128)(2,1)}, /*index=1*/f32[]) all-reduce(%a, %c), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, metadata={op_name="jit(<unnamed function>)/jit(block)/attention/dot_general" stack_frame_id=3}
  %all-gather-start.2 = (bf16[64,256]{1,0}, bf16[64,2048]{1,0}) all-gather-start(%a), replica_groups=mesh['x'=8,'y'=2] {'x','y'}
  %all-gather-done.2 = bf16[64,2048]{1,0} all-gather-done(%all-gather-start.2)
  %sum.call-start = ((bf16[64,512]{1,0}, token[]), bf16[64,512]{1,0}) call-start(%h, %t), async_execution_thread="sparsecore", to_apply=%called_computation
  %fusion.1 = f32[8,128]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
  %fusion.2 = bf16[1024,1024]{1,0} fusion(%w), kind=kLoop, calls=%fused_computation
  %copy-start.3 = (bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[512,1024]{1,0}, u32[]{:S(2)}) copy-start(%w2)
  %copy.4 = bf16[512,1024]{0,1:T(8,128)(2,1)} copy(%w3), metadata={op_name="jit(step)/experts/while"}, backend_config={"a":"%not = one
    of (them)"}
  ROOT %conditional.1 = s32[4]{0} conditional(%i, %x, %y), branch_computations={%skipped, %taken}
}
"""


def test_every_collective_is_found_with_what_it_sends_and_where_it_comes_from():
    found = {one.name: one for one in collectives(TEXT)}
    assert set(found) == {
        "all-reduce.7", "all-gather-start.2", "all-reduce.9", "all-reduce.27", "all-gather.1", "collective-permute.1",
    }  # fmt: skip
    assert (found["all-reduce.27"].is_asynchronous, found["all-reduce.27"].always_runs) == (True, True)
    first = found["all-reduce.7"]
    assert (first.operation, first.arrays, first.num_bytes) == ("all-reduce", ("bf16[64,2048]", "f32[]"), 262148)
    assert (first.num_devices, first.scope, first.always_runs) == (4, "attention/dot_general", True)
    gather = found["all-gather-start.2"]
    assert (gather.arrays, gather.num_devices, gather.is_asynchronous) == (("bf16[64,2048]",), 16, True)
    scatter = found["all-reduce.9"]
    assert (scatter.operation, scatter.arrays, scatter.num_devices) == ("reduce-scatter", ("f32[8,128]",), 8)
    inner = found["all-gather.1"]
    assert (inner.is_conditional, inner.num_loops, inner.num_devices) == (True, 1, 2)
    assert inner.scope == "sampler/while/reduce"
    permute = found["collective-permute.1"]
    assert (permute.is_conditional, permute.num_loops, permute.num_devices) == (True, 0, 3)
    assert str(inner) == "all-gather s32[4] of 2 in sampler/while/reduce in a branch in 1 loops"


def test_copies_are_those_that_pass_over_memory_for_themselves():
    assert [(one.name, one.num_bytes, one.scope) for one in copies(TEXT, 1 << 20)] == [
        ("copy.4", 1 << 20, "experts/while")
    ]
    assert [one.name for one in copies(TEXT, 0)] == ["copy.4", "copy.2"]
