"""`TrainingIteration`: one rank walks its list of ops."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.pipeline_parallel.planning.dataflow import Message, message_of, need_of, result_of
from megatron.pipeline_parallel.planning.op import Op, OpKind, Schedule
from megatron.pipeline_parallel.runtime.autograd import ChunkGraph
from megatron.pipeline_parallel.runtime.channels import Channels
from megatron.pipeline_parallel.runtime.rng import DropoutKeys
from megatron.pipeline_parallel.runtime.weight_grad import WeightGradStore


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What the last stage returns."""

    value: Tensor
    """Scalar to differentiate, scaled as gradients should be."""
    report: Any = None
    """What the caller wants to know of this microbatch; tensors in it must be detached."""


Chunk = Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...] | Loss]
"""A model chunk: (microbatch, inputs) -> outputs for the next stage, or on the last stage the `Loss`.

Stage 0 gets no inputs. Chunks are called in microbatch order.
"""


class TrainingIteration:
    """Runs one rank's program of a lowered schedule.

    `chunks[c]` computes the rank's chunk c. All state of a run is gone when it ends. Nothing here asks which schedule
    it is: each kind of op has one handler. Raises ValueError for ops that no handler knows, for sequence splits, and for a
    schedule without messages.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        rank: int,
        chunks: Sequence[Chunk],
        channels: Channels,
        weight_grads: WeightGradStore,
        dropout_keys: DropoutKeys | None = None,
    ) -> None:
        if not schedule.lowered:
            raise ValueError(f"schedule {schedule.name!r} has no messages yet: run the communication pass first")
        if schedule.num_sequence_splits != 1:
            raise ValueError(f"schedule {schedule.name!r} splits sequences, which this runtime cannot do yet")
        if len(chunks) != schedule.placement.chunks_per_rank:
            raise ValueError(
                f"schedule {schedule.name!r} needs {schedule.placement.chunks_per_rank} chunks a rank, got {len(chunks)}"
            )
        self.schedule = schedule
        self.ops = schedule.ranks[rank]
        unknown = sorted({op.kind for op in self.ops} - self.handlers.keys())
        if unknown:
            raise ValueError(f"schedule {schedule.name!r} has ops that this runtime cannot run: {', '.join(unknown)}")
        self._chunks = chunks
        self._channels = channels
        self._weight_grads = weight_grads
        self._dropout_keys = dropout_keys
        self._trains = any(op.kind in (OpKind.B, OpKind.BW) for op in self.ops)
        self._iteration = 0
        self._graphs: dict[tuple[int, int, int], ChunkGraph] = {}
        self._results: dict[Message, tuple[Tensor, ...]] = {}
        self._reports: dict[int, Any] = {}

    def run(self, iteration: int) -> list[Any]:
        """Run the program once.

        `iteration` keys the dropout. Returns the reports of the last stage in microbatch order, an empty list on ranks
        that do not hold it. When it returns, every message has been sent and every graph is gone.
        """
        self._iteration = iteration
        try:
            with torch.set_grad_enabled(self._trains):
                for op in self.ops:
                    self.handlers[op.kind](self, op)
            self._channels.finish()
        except BaseException:
            self._forget()
            raise
        reports, self._reports = self._reports, {}
        return [reports[microbatch] for microbatch in sorted(reports)]

    def num_live(self) -> int:
        """Graphs, results and weight gradients that are held now; 0 between runs."""
        return len(self._graphs) + len(self._results) + self._weight_grads.num_waiting()

    def _forget(self) -> None:
        """Let go of what a failed run held; its messages can't be called back, so its channels are of no more use."""
        self._channels.abandon()
        self._graphs.clear()
        self._results.clear()
        self._reports.clear()
        self._weight_grads.clear()

    def _forward(self, op: Op) -> None:
        inputs = self._take(need_of(op, self.schedule.placement.num_stages)) or ()
        if self._dropout_keys is not None:
            self._dropout_keys.enter(self._iteration, op.microbatch, op.sequence_split)
        graph = ChunkGraph() if self._trains else None
        if graph is not None:
            inputs = graph.enter(inputs)
        result = self._chunks[op.chunk](op.microbatch, inputs)
        # Inputs are freed here unless the graph saved them.
        del inputs
        outputs = self._checked(result, op)
        if isinstance(result, Loss):
            self._reports[op.microbatch] = result.report
        # Else the output would outlive its SEND.
        del result
        if graph is not None:
            outputs = graph.leave(outputs)
            self._graphs[op.unit] = graph
        self._give(result_of(op, self.schedule.placement.num_stages), outputs)

    def _checked(self, result: Any, op: Op) -> tuple[Tensor, ...]:
        """The tensors that leave a chunk; TypeError or ValueError when it returns what its stage may not."""
        if op.stage == self.schedule.placement.num_stages - 1:
            if not isinstance(result, Loss):
                raise TypeError(f"the last stage's chunk must return a Loss, got {type(result).__name__}")
            if result.value.dim():
                raise ValueError(f"the last stage's loss must be a scalar, got shape {tuple(result.value.shape)}")
            return (result.value,)
        if not (isinstance(result, tuple) and all(isinstance(tensor, Tensor) for tensor in result)):
            raise TypeError(
                f"the chunk of stage {op.stage} must return a tuple of tensors, got {type(result).__name__}"
            )
        return result

    def _backward(self, op: Op) -> None:
        if self._dropout_keys is not None:
            # A checkpointed layer draws its masks again.
            self._dropout_keys.enter(self._iteration, op.microbatch, op.sequence_split)
        gradients = self._take(need_of(op, self.schedule.placement.num_stages))
        input_gradients = self._graphs.pop(op.unit).backward(gradients)
        self._give(result_of(op, self.schedule.placement.num_stages), input_gradients)

    def _backward_input(self, op: Op) -> None:
        with self._weight_grads.collect(op.unit):
            self._backward(op)

    def _backward_weight(self, op: Op) -> None:
        self._weight_grads.compute(op.unit)

    def _send(self, op: Op) -> None:
        message = message_of(op)
        self._channels.send(message, self._results.pop(message))

    def _post_receive(self, op: Op) -> None:
        self._channels.post(message_of(op))

    def _take(self, need: Message | None) -> tuple[Tensor, ...] | None:
        """What a neighbouring stage made: handed over on this rank, or received; None at the pipeline's ends."""
        if need is None:
            return None
        if self.schedule.placement.is_local(need.source, need.destination):
            return self._results.pop(need)
        return self._channels.receive(need)

    def _give(self, result: Message | None, tensors: tuple[Tensor, ...]) -> None:
        """Keep a result until its SEND, or until the next stage on this rank takes it."""
        if result is not None:
            self._results[result] = tensors

    # Of the class, not of an object: bound methods would make each iteration a cycle that only the collector frees.
    handlers: Mapping[OpKind, Callable[["TrainingIteration", Op], None]] = {
        OpKind.F: _forward,
        OpKind.B: _backward_input,
        OpKind.W: _backward_weight,
        OpKind.BW: _backward,
        OpKind.SEND_FORWARD: _send,
        OpKind.RECV_FORWARD: _post_receive,
        OpKind.SEND_BACKWARD: _send,
        OpKind.RECV_BACKWARD: _post_receive,
    }
