"""What each kind of row of a timeline does on its rank: one handler per kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from schedlang.runtime.staging import parking
from schedlang.runtime.staging.again import recompute
from schedlang.runtime.staging.flight import Message, work_of
from schedlang.runtime.staging.step import Step
from schedlang.timeline import Kind, Op

Handler = Callable[[Step, Op], None]


def _send(step: Step, op: Op) -> None:
    """Send what an operation has made for another stage; sizes go before it the first time."""
    back = op.kind is Kind.SEND_B
    name = Message(back, op.stage, op.peer, op.replica, op.microbatch, op.slice)
    tensors = step.outbox.pop(name)
    to = step.pipe.rank_of(op.peer, op.replica)
    header = False if back else step.pipe.sizes.told(step.signatures[op.microbatch], name, tensors)
    step.pipe.mail.send(to, name, tensors, header=header)


def _receive(step: Step, op: Op) -> None:
    """Post the receive of what another stage sends."""
    back = op.kind is Kind.RECV_B
    name = Message(back, op.peer, op.stage, op.replica, op.microbatch, op.slice)
    source, stage = step.pipe.rank_of(op.peer, op.replica), step.pipe.stages[op.stage]
    if back:
        work = work_of(op)
        count = len(stage.awaited[op.peer])
        step.pipe.mail.post(source, name, count, lambda: step.gradient_layout(work, op.peer))
        return
    sizes, signature = step.pipe.sizes, step.signatures[op.microbatch]
    step.pipe.mail.post(
        source, name, len(stage.incoming[op.peer]),
        lambda: sizes.known(signature, name), lambda layout: sizes.learn(signature, name, layout),
    )  # fmt: skip


HANDLERS: Mapping[Kind, Handler] = {
    Kind.F: lambda step, op: step.forward(work_of(op)),
    Kind.B: lambda step, op: step.backward(work_of(op)),
    Kind.I: lambda step, op: step.input_backward(work_of(op)),
    Kind.W: lambda step, op: step.weight_backward(work_of(op)),
    Kind.SEND_F: _send,
    Kind.SEND_B: _send,
    Kind.RECV_F: _receive,
    Kind.RECV_B: _receive,
    Kind.RECOMPUTE: recompute,
    Kind.EVICT: lambda step, op: step.pipe.parking.evict(step, op),
    Kind.HOLD: lambda step, op: step.pipe.parking.hold(step, op),
    Kind.GIVE: lambda step, op: step.pipe.parking.give(step, op),
    Kind.LOAD: lambda step, op: step.pipe.parking.load(step, op),
    Kind.OFFLOAD: parking.offload,
    Kind.RELOAD: parking.reload,
}
