"""Words of other systems and papers (verbs, orders, arguments), with what to write here: tables.

Used in help texts when a word is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_COPIES = "each rank of an axis has other rows and a full copy: `zero(stage=0, over=dp)`"
_SLICES = "shard and gather parameters: `zero(stage=3, over=dp)`"
_RECOMPUTES = "`layers.*  checkpoint()` recomputes"
_SEQUENCES = "split sequences: `layers.*.attn  context_parallel(ring, over=cp)`"
_MICRO = 'split the batch into microbatches: `pipeline(order="1F1B", micro=4)`'
_SPLITS = "shard a pair: `mlp.up  shard(col, over=tp)` and `mlp.down  shard(row, over=tp)`"


def _helps_for(words: str, *helps: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(words.split(), helps)


VERBS: Mapping[str, tuple[str, ...]] = {
    **_helps_for("replicate data_parallel ddp dp broadcast", _COPIES),
    **_helps_for("fsdp fully_shard fsdp2 hsdp", _SLICES),
    **_helps_for("zero1 zero_1", "`zero(stage=1, over=dp)` slices optimizer state"),
    **_helps_for("zero2 zero_2", "`zero(stage=2, over=dp)` slices gradients, too"),
    **_helps_for("zero3 zero_3", _SLICES),
    **_helps_for(
        "reduce allreduce all_reduce",
        "all-reduce gradients: `zero(stage=0, over=dp)`",
        "with fewer bytes, in a row below: `compress(gradients, int8, over=dp)`",
    ),
    **_helps_for(
        "gather all_gather allgather gather_features gather_with_grad",
        "gather rows that a loss compares: `projection  gather_rows(over=dp)`",
        "parameters are gathered by `zero(stage=3, over=dp)`",
    ),
    **_helps_for(
        "slice split microbatch micro_batch accumulate gradient_accumulation",
        _MICRO,
        'split sequences into slices: `pipeline(order="Seq1F1B", micro=4, slices=4)`',
    ),
    **_helps_for(
        "tensor_parallel tp parallelize column_parallel row_parallel colwise rowwise", _SPLITS
    ),
    **_helps_for(
        "sequence_parallel sp",
        "shard norms along tokens: `layers.*.norm  shard(input=S(seq), output=S(seq), over=tp)`",
        _SEQUENCES,
    ),
    **_helps_for("ring ring_attention ulysses cp", _SEQUENCES),
    **_helps_for(
        "pipeline_parallel pp stages stage",
        "cut the model into stages: `layers  pipeline_split(over=pp)`",
        'and choose their order: `pipeline(order="1F1B", micro=4)`',
    ),
    **_helps_for("expert ep moe experts", "shard experts: `mlp.experts  expert_parallel(over=ep)`"),
    **_helps_for(
        "place shadow",
        "copy hot experts to all ranks: `mlp.experts  expert_parallel(over=ep, shadow=[0])`",
    ),
    **_helps_for(
        "recompute remat rematerialize activation_checkpointing gradient_checkpointing ckpt",
        _RECOMPUTES,
    ),
    **_helps_for(
        "swap stream cpu_offload", "move saved tensors: `layers.*  offload(activations, to=cpu)`"
    ),
    **_helps_for(
        "quantize quantise",
        "compress saved activations: `layers.*  compress(activations, int8)`",
        "compute with 16 bits: `cast(bf16)`",
    ),
    **_helps_for("autocast amp mixed_precision half", "compute with 16 bits: `cast(bf16)`"),
    **_helps_for("compile jit script torch_compile", "compile a module: `layers.*.mlp  fuse()`"),
    **_helps_for("kernel swap_kernel", "`layers.*.norm  replace_kernel(rms_norm)`"),
    **_helps_for("reorder", "delay weight gradients: `layers.*  split_backward()`"),
    **_helps_for("share share_weights", "share parameters between modules: `layers[2:]  tie()`"),
    **_helps_for(
        "rewrite",
        "replace a module by your own: `layers.*.mlp  replace(my_mlp)`",
        "separate a bias from its product: `layers.*.mlp.up  decompose(bias)`",
    ),
    **_helps_for(
        "sync", "set the placement of the output: `mlp.down  shard(row, output=R, over=tp)`"
    ),
    **_helps_for("capture trace", "drop the row: tracing needs no row"),
    **_helps_for(
        "plan search tune",
        "balance stages by cost: `layers  pipeline_split(over=pp, balance=time)`",
        "plan recomputation: `layers.*  checkpoint(plan=rotor, memory=2GiB)`",
        "write rows for a model and a mesh with a command: `schedlang init MODEL`",
    ),
    **_helps_for(
        "simulate", "use the command: `schedlang simulate --order 1f1b --stages 4 --micro 8`"
    ),
    **_helps_for(
        "protect", "save and load the state in Python, under any layout: `program.save(path)`"
    ),
    **_helps_for("init", "write rows for a model with a command: `schedlang init MODEL`"),
    **_helps_for(
        "relax", 'write it at the step whose rows need it: `step "name" relax(staleness) {`'
    ),
    **_helps_for(
        "cache",
        "no primitive caches rows of an embedding; shard it: `embed  shard(vocab, over=tp)`",
    ),
}

ORDERS: Mapping[str, str] = {
    **dict.fromkeys(("zb", "zbh1", "zerobubble", "zero_bubble"), "ZB-H1"),
    "zbh2": "ZB-H2",
    **dict.fromkeys(("v_half", "vhalf"), "V-Half"),
    **dict.fromkeys(("v_min", "vmin"), "V-Min"),
    "v_zb": "ZB-V",
    **dict.fromkeys(("fold", "fold3d", "vpp"), "Interleaved1F1B"),
    "looped": "BFS",
    "bidirectional": "Chimera",
    **dict.fromkeys(("searched", "tessel"), "search"),
    "dapple": "Eager1F1B",
    **dict.fromkeys(("afab", "f_then_b", "layer_major"), "GPipe"),
    **dict.fromkeys(("flush", "pipedream_flush", "graph", "modality", "adaptive", "csp"), "1F1B"),
    "pipedream_2bw": "PipeDream-2BW",
    "lwp": "Pipelined-Backprop",
    "swarm": "Varuna",
    "dualpipe_v": "DualPipeV",
    "seq_1f1b": "Seq1F1B",
}

# Names of orders that are known, in small letters: reading a file does not import the orders.
ORDER_NAMES = frozenset(
    (
        *("1f1b", "1f1b-eager", "1f1b-i", "1f1b-v", "2bw", "bfs", "bpipe", "breadth-first"),
        *("chimera", "dapple-pb", "dualpipe", "dualpipev", "eager1f1b", "gems", "gis", "gis-h"),
        *("gpipe", "hanayo", "interleaved", "interleaved-zb", "interleaved1f1b"),
        *("interleavedzerobubble", "loopedbfs", "pb", "pipedream", "pipedream-2bw"),
        *("pipedream-flush", "pipelined-backprop", "pipelinedbackprop", "pipemare", "schedule1f1b"),
        *("scheduledualpipev", "schedulegpipe", "scheduleinterleaved1f1b"),
        *("scheduleinterleavedzerobubble", "scheduleloopedbfs", "schedulezbvzerobubble", "search"),
        *("seq1f1b", "terapipe", "v-half", "v-min", "varuna", "wave", "zb-1p", "zb-2p", "zb-h1"),
        *("zb-h2", "zb-i", "zb-v", "zbv", "zbvzerobubble"),
    )
)


class Replacement(NamedTuple):
    """The replacement of an argument that other systems have and schedlang has not.

    argument  the argument to write instead, `{}` being its value; "": drop the argument; None: the
              whole row becomes `row`. Of several, separated by commas, the one with `{}`, or the
              first, is the replacement; the others are defaults that another argument of their name
              replaces
    why       a note for the reader
    row       another row: instead of this one, or (with `argument`) in addition to it
    """

    argument: str | None = ""
    why: str = ""
    row: str = ""


# keys: `argument=value`, `argument`, or `=value` for a positional one
Table = Mapping[str, Replacement]

_OWN_MASK = "a kernel uses the model's own mask, and is compared with the module"
_OWN_DRAWS = "dropout masks are drawn as the model draws them; results do not change"
_ROUTER = "the model's own router stays"
_AS_STORED = "parameters, their gradients and moments stay as they are stored"
_ONE = "a row moves one thing"
_CHOSEN = "choose the modules with the selector: `layers[:6]`"
_ORDER = Replacement(
    "", "the order of stages needs a separate row", 'pipeline(order="{}", micro=4)'
)
_EXPERTS_BESIDE = Replacement(
    None,
    "tokens are sent in chunks; each is sent while the one before is computed",
    "layers.*.mlp.experts  expert_parallel(over=ep, chunks=2)",
)
_GRADIENTS = Replacement("gradients")
_TRANSFERS = Replacement("transfers")
_BEHIND = Replacement(
    None,
    "parameters are gathered before their modules need them",
    "zero(stage=3, over=dp, prefetch=1)",
)
_GRID = "products over a grid of ranks have their own primitive"
_EIGHT = "no primitive computes with 8 bits; 16 are the fewest"


def _entry_for(words: str, replacement: Replacement) -> dict[str, Replacement]:
    return dict.fromkeys(words.split(), replacement)


ARGUMENTS: Mapping[str, Table] = {
    "checkpoint": {
        **_entry_for(
            "save=flash_attention save=sdpa save=flex_attention save=flash save=attn save=attn_out"
            " save=attention_core save=scaled_dot_product_attention",
            Replacement("attention", "`attention` means any attention kernel"),
        ),
        **_entry_for(
            "save=matmul save=mm save=gemm save=linears save=matrix_products", Replacement("linear")
        ),
        **_entry_for(
            "save=all_to_all save=all_reduce save=all_gather save=reduce_scatter save=comm",
            Replacement("collective"),
        ),
        "=selective": Replacement("save=[linear]", "`save` lists the results that are saved"),
        "=full": Replacement(""),
        "=except_last": Replacement(None, "select the other modules", "layers[:-1]  checkpoint()"),
        "=dtr": Replacement("plan=dtr, memory=2GiB"),
        "=rotor": Replacement("plan=rotor, memory=2GiB"),
        "=sqrt": Replacement("group=sqrt"),
        "=save": Replacement("save=[attention]"),
        **_entry_for(
            "mem budget",
            Replacement("plan=rotor, memory={}", "a plan fits the modules into this memory"),
        ),
        **_entry_for(
            "mem=cap budget=cap cap",
            Replacement("memory=2GiB, plan=rotor", "a plan fits the modules into this memory"),
        ),
        **_entry_for(
            "segments into", Replacement("group=sqrt", "`group` counts the modules of a group")
        ),
        **_entry_for("policy context_fn", Replacement("save=[linear]")),
        "ratio": Replacement(None, _CHOSEN, "layers[:6]  checkpoint()"),
        "offload": Replacement("", "", "layers.*  offload(activations)"),
        **_entry_for("use_reentrant preserve_rng_state h reuse =reuse", Replacement("")),
    },
    "offload": {
        **_entry_for("what=grads what=grad", _GRADIENTS),
        **_entry_for("what=params what=weights", Replacement("parameters")),
        **_entry_for("what=optim what=optimizer_state what=states", Replacement("optimizer")),
        **_entry_for("to=nvme to=ssd to=file", Replacement("disk")),
        **_entry_for("to=host to=ram to=memory to=pinned", Replacement("cpu")),
        **_entry_for("window=auto prefetch=auto =stream", Replacement("prefetch=1")),
        "window": Replacement("prefetch={}"),
        **_entry_for("ratio =pipeline_aware group chunk", Replacement("", _CHOSEN)),
        **_entry_for(
            "pin_memory non_blocking",
            Replacement("", "on a GPU copies are pinned and run on a separate stream"),
        ),
        "optimizer": Replacement("", "the step runs where its state is"),
        **_entry_for("=optimizer =optim", Replacement("", _ONE, "offload(optimizer, to=cpu)")),
        **_entry_for("=params =parameters", Replacement("", _ONE, "offload(parameters, to=cpu)")),
        **_entry_for("=grads =gradients", Replacement("", _ONE, "offload(gradients, to=cpu)")),
        "=activations": Replacement("", _ONE, "layers.*  offload(activations, to=cpu)"),
        "prefetch=predict": Replacement("prefetch=1"),
        "stage": Replacement(
            None, "an order moves the saved tensors of a stage", 'pipeline(order="BPipe", micro=8)'
        ),
    },
    "compress": {
        **_entry_for("what=grads what=grad what=reduce", Replacement("gradients, over=dp")),
        **_entry_for(
            "what=weights what=params what=pipe what=a2a what=pipe.backward",
            Replacement(
                None,
                "only gradient all-reduces and saved activations can be compressed",
                "compress(gradients, int8, over=dp)",
            ),
        ),
        "what=acts": Replacement("activations"),
        "how=zfp": Replacement("int8"),
        **_entry_for("group block_size", Replacement("block={}")),
        **_entry_for(
            "error feedback ef",
            Replacement("error_feedback=true", "`error_feedback` is on by default"),
        ),
        "stochastic": Replacement("", "rounding is always stochastic"),
        "=stochastic": Replacement("", "rounding is always stochastic"),
        **_entry_for("ema per select warmup two_level =a2a =two_level =adam", Replacement("")),
    },
    "cast": {
        **_entry_for("dtype=half dtype=float16", Replacement("fp16")),
        "dtype=bfloat16": Replacement("bf16"),
        **_entry_for("dtype=float dtype=float32 dtype=full", Replacement("fp32")),
        **_entry_for("dtype=fp8 dtype=s2fp8 dtype=int8 dtype=float8", Replacement("bf16", _EIGHT)),
        **_entry_for(
            "loss_scale=dynamic =loss_scale scaler grad_scaler",
            Replacement("", "each `fp16` row scales the loss, and adapts the scale"),
        ),
        "loss_scale": Replacement("scale={}"),
        **_entry_for("master =master =master_weights", Replacement("", _AS_STORED)),
        "=autocast": Replacement("", "it is torch's autocast unless you write `params=true`"),
        **_entry_for("=e4m3 =e5m2 =chunk =stochastic_round chunk group act =ptq", Replacement("")),
        "reduce": Replacement("", "gradients are reduced in the dtype in which they are stored"),
    },
    "fuse": {
        **_entry_for("with=triton backend=triton with=rowwise", Replacement("backend=rowwise")),
        **_entry_for(
            "with=inductor with=compile with=torch_compile with=nvfuser with=torchscript"
            " backend=compile backend=torchscript backend=nvfuser",
            Replacement("backend=inductor"),
        ),
        "with=auto": Replacement("backend=auto"),
        "rng": Replacement("", _OWN_DRAWS),
        **_entry_for("fullgraph dynamic mode", Replacement("", "a region must be one graph")),
    },
    "replace_kernel": {
        "causal": Replacement("", _OWN_MASK),
        **_entry_for(
            "mask window dropout dropout_p scale softcap is_causal softmax_scale",
            Replacement("", _OWN_MASK),
        ),
        **_entry_for("eps offset block", Replacement("", "it is measured on the module")),
        **_entry_for("kernel=flash kernel=fa kernel=flash_attn", Replacement("flash_attention")),
        **_entry_for("kernel=flex", Replacement("flex_attention")),
        **_entry_for(
            "kernel=attention kernel=xformers kernel=scaled_dot_product_attention",
            Replacement("sdpa"),
        ),
        **_entry_for(
            "kernel=grouped_gemm kernel=grouped_mm kernel=megablocks kernel=scatter2scatter"
            " kernel=scattermoe",
            Replacement("grouped"),
        ),
        **_entry_for(
            "kernel=swiglu kernel=geglu kernel=liger.swiglu kernel=liger.geglu",
            Replacement("gated"),
        ),
        "kernel=liger.rope": Replacement("rope"),
        "kernel=liger.cross_entropy": Replacement("cross_entropy"),
        **_entry_for(
            "kernel=liger.fused_linear_cross_entropy kernel=fused_linear_cross_entropy",
            Replacement("linear_cross_entropy"),
        ),
        **_entry_for(
            "kernel=sliding_window kernel=tiled_gemm",
            Replacement(
                None,
                "a kernel computes the same as its module; use your own module instead",
                "layers.*.attn  replace(my_attention)",
            ),
        ),
    },
    "decompose": {"what=linear": Replacement("bias")},
    "pipeline_split": {
        **_entry_for("balance=peak_memory balance=mem", Replacement("memory")),
        **_entry_for("balance=flops balance=latency balance=cost", Replacement("time")),
        "balance=parameters": Replacement("params"),
        **_entry_for("balance=layers balance=uniform balance=none", Replacement("even")),
        **_entry_for("order schedule using =", _ORDER),
        **_entry_for(
            "into stages parts",
            Replacement(
                "", "the number of stages is the ranks of `over` times the `chunks` of the order"
            ),
        ),
        **_entry_for(
            "chunks waves directions",
            Replacement(
                "",
                "the order sets the stages on each rank",
                'pipeline(order="Interleaved1F1B", micro=8, chunks={})',
            ),
        ),
        "side": Replacement("", "a stage begins with the selected module"),
        **_entry_for(
            "micro microbatches",
            Replacement("", "the order takes this argument", 'pipeline(order="1F1B", micro={})'),
        ),
    },
    "pipeline": {
        **_entry_for("schedule using", Replacement('order="{}"')),
        **_entry_for(
            "microbatches num_microbatches n_microbatches micro_batches", Replacement("micro={}")
        ),
        **_entry_for("accumulate gradient_accumulation_steps", Replacement("micro={}")),
        **_entry_for("into stages", Replacement("", "", "layers  pipeline_split(over=pp)")),
        **_entry_for("stash checkpoint", Replacement("")),
    },
    "zero": {
        "reshard_after_forward": Replacement("reshard={}"),
        **_entry_for(
            "unit =unit =chunk capture",
            Replacement("", "units are the elements of the model's module lists"),
        ),
        **_entry_for("offload cpu_offload", Replacement("", "", "offload(optimizer, to=cpu)")),
        **_entry_for(
            "secondary group",
            Replacement(
                "",
                "slices are over the axes of `over`; replicate over another axis",
                "zero(stage=0, over=nodes)",
            ),
        ),
    },
    "shard": {
        **_entry_for(
            "style=column style=colwise style=columnwise style=column_parallel by=column",
            Replacement("col"),
        ),
        **_entry_for("style=rowwise style=row_parallel", Replacement("row")),
        **_entry_for(
            "style=seq style=sequence",
            Replacement(
                "input=S(seq), output=S(seq)", "this is for a norm between two sharded layers"
            ),
        ),
        **_entry_for("style=vocab_parallel style=embedding", Replacement("vocab")),
        "style=summa": Replacement(None, _GRID, "layers.*.mlp.up  grid(summa, over=(r, c))"),
        "style=cube": Replacement(None, _GRID, "layers.*.mlp.up  grid(cube, over=(x, y, z))"),
        **_entry_for(
            "style=h style=w style=spatial",
            Replacement(
                None,
                "images are split along a dim; the halo is measured",
                "conv  shard(input=S(2), output=S(2), over=sp)",
            ),
        ),
        "style=dim": Replacement(
            None,
            "set the placements of input and output",
            "layers.*.attn  shard(input=S(2), output=S(1), over=cp)",
        ),
        **_entry_for(
            "style=batch style=data",
            Replacement(
                None, "the batch is split over the axes of `zero`", "zero(stage=0, over=dp)"
            ),
        ),
        "by=col": Replacement("col"),
        "by=row": Replacement("row"),
        "by=vocab": Replacement("vocab"),
        **_entry_for(
            "rng=per_rank rng",
            Replacement(
                "",
                "every rank draws the full mask and keeps its shard:"
                " the same numbers as one process",
            ),
        ),
        **_entry_for("gather_output", Replacement("output=R")),
        "input_is_parallel": Replacement("input=S(-1)"),
        "sequence_parallel": Replacement("output=S(seq)"),
        **_entry_for("halo stride", Replacement("", "the halo is found by tracing")),
    },
    "context_parallel": {
        **_entry_for("method=ring_attention method=p2p", Replacement("ring")),
        **_entry_for("method=all_gather method=allgather method=kv_gather", Replacement("gather")),
        **_entry_for(
            "method=all_to_all method=a2a method=deepspeed_ulysses", Replacement("ulysses")
        ),
        **_entry_for("method=two_d method=loongtrain", Replacement("usp")),
        **_entry_for("method=n_body method=wallfacer", Replacement("nbody")),
        "method=burst": Replacement("double_ring"),
        **_entry_for(
            "layout=head_tail layout=load_balanced layout=balanced", Replacement("layout=zigzag")
        ),
        **_entry_for("layout=stripe layout=round_robin", Replacement("layout=striped")),
        "balance": Replacement("layout=zigzag", "this layout gives all ranks equal work"),
        "double": Replacement("", "for rings in rings write `double_ring, over=(nodes, gpus)`"),
        **_entry_for("blockwise store inner_ring first causal c", Replacement("")),
    },
    "expert_parallel": {
        **_entry_for(
            "dispatch=a2a dispatch=alltoall dispatch=all2all", Replacement("dispatch=all_to_all")
        ),
        **_entry_for("=a2a =all_to_all", Replacement("dispatch=all_to_all")),
        **_entry_for(
            "dispatch=allgather dispatch=all_gather =gather", Replacement("dispatch=gather")
        ),
        "=fetch": Replacement("dispatch=fetch"),
        "=experts": Replacement(""),
        "=adaptive": Replacement(""),
        **_entry_for(
            "capacity=inf capacity=infinite", Replacement("", "by default no token is dropped")
        ),
        "capacity_factor": Replacement("capacity={}"),
        **_entry_for("degree slices parts", Replacement("chunks={}")),
        **_entry_for("tp tensor", Replacement("inner=tp")),
        **_entry_for("top top_k group residual topology_loss", Replacement("", _ROUTER)),
        **_entry_for("prefetch share", Replacement("")),
    },
    "overlap": {
        **_entry_for(
            "what=reduce what=allreduce what=all_reduce what=grads what=reduce_scatter what=grad",
            _GRADIENTS,
        ),
        **_entry_for("what=p2p what=send what=recv what=sends", _TRANSFERS),
        **_entry_for("what=gather what=all_gather what=allgather what=params", _BEHIND),
        **_entry_for(
            "what=all_to_all what=a2a what=alltoall what=dispatch what=combine", _EXPERTS_BESIDE
        ),
        "what=load": Replacement(
            None,
            "copies start before their modules need them",
            "offload(parameters, to=cpu, prefetch=1)",
        ),
        "what=place": Replacement(
            None,
            "hot experts are copied to all ranks",
            "layers.*.mlp.experts  expert_parallel(over=ep, shadow=[0])",
        ),
        **_entry_for(
            "what=priority what=first_layer_first what=optimal_order",
            Replacement(
                "gradients",
                "all-reduces start in the order in which backward computes the gradients",
            ),
        ),
        "into": Replacement(""),
        **_entry_for(
            "with priority", Replacement("", "communication overlaps with any computation")
        ),
    },
    "split_backward": _entry_for("=wgrad =late wgrad", Replacement("")),
    "pad": _entry_for("to multiple_of", Replacement("multiple={}")),
    "freeze": _entry_for(
        "names=grad_norm names=rotate",
        Replacement(None, "select the modules that are frozen", "layers[:2]  freeze()"),
    ),
    "tie": {"to": Replacement("", "the first selected module gives its parameters")},
    "verify": {"atol": Replacement("", "in float64 the tolerance follows from the norms")},
}
