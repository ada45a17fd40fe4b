"""Verbs and orders in words of other systems and papers, and what is here: tables, no code."""

from __future__ import annotations

from collections.abc import Mapping

_COPIES = "each rank of an axis has rows of the batch and a whole copy: `zero(stage=0, over=dp)`"
_SLICES = "parameters are sliced and gathered: `zero(stage=3, over=dp)`"
_RECOMPUTES = "`layers.*  checkpoint()` recomputes"
_SEQUENCES = "`layers.*.attn  context_parallel(ring, over=cp)` splits sequences"
_MICRO = 'a batch is cut into microbatches by `pipeline(order="1F1B", micro=4)`'
_SPLITS = "`mlp.up  shard(col, over=tp)` and `mlp.down  shard(row, over=tp)` split a pair"


def _told(words: str, *helps: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(words.split(), helps)


VERBS: Mapping[str, tuple[str, ...]] = {
    **_told("replicate data_parallel ddp dp broadcast", _COPIES),
    **_told("fsdp fully_shard fsdp2 hsdp", _SLICES),
    **_told("zero1 zero_1", "`zero(stage=1, over=dp)` slices optimizer state"),
    **_told("zero2 zero_2", "`zero(stage=2, over=dp)` slices gradients, too"),
    **_told("zero3 zero_3", _SLICES),
    **_told("reduce allreduce all_reduce", "gradients are summed by `zero(stage=0, over=dp)`",
            "in fewer bytes with `compress(gradients, int8, over=dp)` below it"),
    **_told("slice split microbatch micro_batch accumulate", _MICRO,
            'sequences by `pipeline(order="Seq1F1B", micro=4, slices=4)`'),
    **_told("tensor_parallel tp parallelize column_parallel row_parallel", _SPLITS),
    **_told("sequence_parallel sp", "between a row and a column: "
            "`layers.*.norm  shard(input=S(seq), output=S(seq), over=tp)`", _SEQUENCES),
    **_told("ring ring_attention ulysses cp", _SEQUENCES),
    **_told("pipeline_parallel pp stages stage", "`layers  pipeline_split(over=pp)` cuts stages",
            'and `pipeline(order="1F1B", micro=4)` runs them'),
    **_told("expert ep moe experts", "`mlp.experts  expert_parallel(over=ep)` spreads experts"),
    **_told("place shadow", "hot experts are with all tokens by "
            "`mlp.experts  expert_parallel(over=ep, shadow=[0])`"),
    **_told("recompute remat rematerialize activation_checkpointing gradient_checkpointing ckpt",
            _RECOMPUTES),
    **_told("swap stream cpu_offload", "`layers.*  offload(activations, to=cpu)` moves what is"
            " saved"),
    **_told("quantize quantise", "saved activations in few bits: "
            "`layers.*  compress(activations, int8)`", "arithmetic in sixteen: `cast(bf16)`"),
    **_told("autocast amp mixed_precision half", "`cast(bf16)` computes in sixteen bits"),
    **_told("compile jit script torch_compile", "`layers.*.mlp  fuse()` compiles a region"),
    **_told("kernel swap_kernel", "`layers.*.norm  replace_kernel(rms_norm)`"),
    **_told("reorder", "weights' gradients wait behind `layers.*  split_backward()`"),
    **_told("share share_weights", "`layers[2:]  tie()` gives modules one set of parameters"),
    **_told("rewrite", "a module of your own takes another's place: "
            "`layers.*.mlp  replace(my_mlp)`", "a bias apart from its product: "
            "`layers.*.mlp.up  decompose(bias)`"),
    **_told("sync", "`shard` says both ends: `mlp.down  shard(row, output=R, over=tp)`"),
    **_told("capture trace", "nothing has to be traced: drop the row"),
    **_told("plan search tune", "stages by what they cost: "
            "`layers  pipeline_split(over=pp, balance=time)`",
            "what is recomputed: `layers.*  checkpoint(plan=rotor, memory=2GiB)`",
            "a command writes rows for a model and a mesh: `schedlang init MODEL`"),
    **_told("simulate", "that is a command: "
            "`schedlang simulate --order 1f1b --stages 4 --micro 8`"),
    **_told("protect", "a program saves and loads its state under any layout: "
            "`program.save(path)`"),
    **_told("init", "a command writes rows for a model: `schedlang init MODEL`"),
    **_told("relax", "it stands on the step whose rows give something up: "
            '`step "name" relax(staleness) {`'),
    **_told("cache", "no row keeps stale copies of rows of an embedding: "
            "`embed  shard(vocab, over=tp)` splits it"),
}  # fmt: skip

ORDERS: Mapping[str, str] = {
    "zb": "ZB-H1", "zbh1": "ZB-H1", "zbh2": "ZB-H2", "zerobubble": "ZB-H1", "zero_bubble": "ZB-H1",
    "v_half": "V-Half", "v_min": "V-Min", "v_zb": "ZB-V", "vhalf": "V-Half", "vmin": "V-Min",
    "fold": "Interleaved1F1B", "fold3d": "Interleaved1F1B", "vpp": "Interleaved1F1B",
    "looped": "BFS", "bidirectional": "Chimera", "searched": "search", "tessel": "search",
    "dapple": "Eager1F1B", "afab": "GPipe", "f_then_b": "GPipe", "flush": "1F1B",
    "pipedream_flush": "1F1B", "pipedream_2bw": "PipeDream-2BW", "lwp": "Pipelined-Backprop",
    "graph": "1F1B", "modality": "1F1B", "adaptive": "1F1B", "swarm": "Varuna", "csp": "1F1B",
    "dualpipe_v": "DualPipeV", "seq_1f1b": "Seq1F1B", "layer_major": "GPipe",
}  # fmt: skip

# Names of orders that are known, in small letters: reading a file does not import the orders.
ORDER_NAMES = frozenset((
    "1f1b", "1f1b-eager", "1f1b-i", "1f1b-v", "2bw", "bfs", "bpipe", "breadth-first", "chimera",
    "dapple-pb", "dualpipe", "dualpipev", "eager1f1b", "gems", "gis", "gis-h", "gpipe",
    "hanayo", "interleaved", "interleaved-zb", "interleaved1f1b", "interleavedzerobubble",
    "loopedbfs", "pb", "pipedream", "pipedream-2bw", "pipedream-flush", "pipelined-backprop",
    "pipelinedbackprop", "pipemare", "schedule1f1b", "scheduledualpipev", "schedulegpipe",
    "scheduleinterleaved1f1b", "scheduleinterleavedzerobubble", "scheduleloopedbfs",
    "schedulezbvzerobubble", "search", "seq1f1b", "terapipe", "v-half", "v-min", "varuna",
    "wave", "zb-1p", "zb-2p", "zb-h1", "zb-h2", "zb-i", "zb-v", "zbv", "zbvzerobubble",
))  # fmt: skip
