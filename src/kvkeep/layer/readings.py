"""Readings: attention of later layers, which have no slots, to the slots of a layer."""

from __future__ import annotations

from torch import Tensor

from kvkeep.attention import Attend, dispatch
from kvkeep.errors import StateError
from kvkeep.layer.cursor import Cursor
from kvkeep.layer.settling import Settler
from kvkeep.layer.step import StepInputs
from kvkeep.layer.writing import Writer


class Readings:
    """The readings of a layer's slots after its step in the same forward; `Cursor.readers` is their
    number.

    The policy observes and evicts after the last reading, so each reading attends to the same slots
    as the step. The policy observes only the step, not the readings: the number of a reading's
    queries depends on which logits the caller requests, and that must not decide which slots stay.
    """

    def __init__(self, writer: Writer, cursor: Cursor, settler: Settler) -> None:
        self._writer, self._cursor, self._settler = writer, cursor, settler

    def read(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """See `LayerCache.read`."""
        q, k, cursor, writer = inputs.q, inputs.k, self._cursor, self._writer
        with cursor.turn:
            if not cursor.unread:
                raise StateError(
                    "a layer attends to another layer's slots, but all "
                    f"{cursor.readers} readings of the last step are done; feed that layer first"
                )
            n = q.shape[2]
            writer.checks.queries(q, k[:, :, -n:], inputs.sinks, inputs.softcap, writer.slopes)
            writer.check_gradients(q)
            view = writer.view(*(cursor.queries or (None, None)))
            # A reading may have fewer queries; the view's limits hold for each of them.
            bounds = None if view.bounds is None else view.bounds[..., -n:]
            view = view._replace(position=view.position[..., -n:], bounds=bounds)
            out, _ = (attend or dispatch)(q, view, inputs.options(writer.slopes, writer.centre))
            if cursor.unread == 1:
                self._settler.settle(cursor.observed, packs=attend is None)
                cursor.observed = None
            cursor.unread -= 1  # last, so that after an error the forward counts as interrupted
            return out
